"""Serve a model, wait until it is ready, and print its first answer as it is streamed.

Run by scripts/quickstart inside the environment. Standard library only. The server is then left
up, with its URL and an example request on the screen, until Ctrl-C; with --once it is stopped.
"""

import argparse
import http.client
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
DEFAULT_PORT = 8000
PORTS_TO_TRY = 20
READY_SECONDS = 600.0
STOP_SECONDS = 30.0
PROMPT = "In one short sentence: what is the capital of France?"


def say(text: str) -> None:
    print(f"[quickstart] {text}", flush=True)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose_port(asked: int | None) -> int:
    """The asked port, which must be free; or the first free one from 8000 on."""
    if asked is not None:
        if not is_free(asked):
            sys.exit(f"port {asked} is in use; free it, or choose another with --port")
        return asked
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TO_TRY):
        if is_free(port):
            if port != DEFAULT_PORT:
                say(f"port {DEFAULT_PORT} is in use; taking {port}")
            return port
    sys.exit(f"ports {DEFAULT_PORT} to {port} are all in use; choose one with --port")


def wait_until_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    """Return once /health says 200; leave with a message when the server ends or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}; its message is above")
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.2)
    sys.exit(f"the server was not ready after {READY_SECONDS:.0f} s")


def request_body(model: str, prompt: str) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }


def streamed_text(port: int, body: dict[str, object]) -> Iterator[str]:
    """The pieces of the answer, as they arrive (server-sent events)."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(
            f"the server answered {response.status}: {response.read(500).decode(errors='replace')}"
        )
    while line := response.readline():
        data = line.decode("utf-8").strip().removeprefix("data:").strip()
        if data == "[DONE]":
            break
        if data:
            event = json.loads(data)
            if "error" in event:
                sys.exit(f"the server reported an error: {str(event['error'])[:500]}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    connection.close()


def print_answer(port: int, model: str, prompt: str) -> None:
    say("asking (greedy, temperature 0):")
    print(f"> {prompt}", flush=True)
    started = time.monotonic()
    first = None
    for piece in streamed_text(port, request_body(model, prompt)):
        if piece and first is None:
            first = time.monotonic() - started
        print(piece, end="", flush=True)
    print(flush=True)
    if first is None:
        sys.exit("the answer was empty")
    total = time.monotonic() - started
    say(f"first word after {first * 1000:.0f} ms, whole answer after {total * 1000:.0f} ms")


def print_next_steps(port: int, model: str) -> None:
    url = f"http://{HOST}:{port}/v1"
    body = request_body(model, "Write a haiku about the sea.")
    say(f"serving at {url} (OpenAI-compatible); Ctrl-C stops it. Try in another terminal:")
    print(f"curl -N {url}/chat/completions -H 'Content-Type: application/json' \\")
    print(f"  -d {shlex.quote(json.dumps(body))}", flush=True)


def stop(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model and print a first answer.")
    parser.add_argument("--once", action="store_true", help="stop after the first answer")
    parser.add_argument("--port", type=int, help=f"default: {DEFAULT_PORT}, or the next free one")
    parser.add_argument("--model", default="smollm2", help="a pulled model or a path")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    port = choose_port(options.port)
    command = [str(Path(sys.executable).parent / "jaxserve"), "serve", options.model]
    command += ["--host", HOST, "--port", str(port)]
    say(f"starting: jaxserve {' '.join(command[1:])}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server, port)
        say(f"ready after {time.monotonic() - started:.1f} s")
        print_answer(port, options.model, options.prompt)
        if not options.once:
            print_next_steps(port, options.model)
            server.wait()
            sys.exit(f"the server ended with exit code {server.returncode}")
    except KeyboardInterrupt:
        say("stopping the server")
    finally:
        stop(server)
    say("done")


if __name__ == "__main__":
    main()
