"""What scripts/quickstart does once everything is installed: serve, ask, stay up or stop.

The script runs with a stand-in for the `jaxserve` command beside its interpreter.
"""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "first_answer.py"
# serve MODEL --host HOST --port PORT; the model's name says how to behave
STAND_IN = """import http.server, json, os, sys
model, host, port = sys.argv[2], sys.argv[4], int(sys.argv[6])
if model == "dies":
    sys.exit("no such model")

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < 3 else 200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["temperature"] == 0 and body["model"] == model
        self.send_response(400 if model == "base" else 200)
        self.end_headers()
        if model == "base":
            self.wfile.write(b'{"error": {"message": "no chat template"}}')
            return
        deltas = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in ("Par", "is", " \\u00e9.")]
        for delta in deltas if model != "mute" else []:
            event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            if model == "breaks":
                event = {"error": {"message": "engine died"}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *args):
        pass

print("server pid", os.getpid(), flush=True)
http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter with the stand-in beside it, in a folder with a space in its name."""
    folder = tmp_path / "an env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    command = folder / "jaxserve"
    (folder / "stand_in.py").write_text(STAND_IN)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/stand_in.py" "$@"\n')
    command.chmod(0o755)
    return folder / "python"


def first_answer(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def assert_stopped(output: str) -> None:
    """The server of this run is gone."""
    found = re.search(r"server pid (\d+)", output)
    assert found is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)


def test_once_prints_the_streamed_answer_and_stops(python):
    done = first_answer(python, "--once", "--model", "good", "--prompt", "Where?")
    assert done.returncode == 0, done.stderr
    assert "> Where?\nParis é.\n" in done.stdout
    assert "(greedy, temperature 0)" in done.stdout
    assert "ready after" in done.stdout
    assert "curl" not in done.stdout
    assert_stopped(done.stdout)


@pytest.fixture
def staying(python: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run without --once, past its first answer."""
    process = subprocess.Popen(
        [python, SCRIPT, "--model", "good"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_server_stays_up_with_its_url_until_stopped(staying, how):
    seen = ""
    while "-d " not in seen:
        line = staying.stdout.readline()
        assert line, seen
        seen += line
    port = re.search(r"serving at http://127\.0\.0\.1:(\d+)/v1", seen)
    assert port is not None
    assert f"curl -N http://127.0.0.1:{port[1]}/v1/chat/completions" in seen
    time.sleep(0.1)
    connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    staying.send_signal(how)
    rest = staying.communicate(timeout=30)[0]
    assert ("stopping the server" in rest) == (how is signal.SIGINT)
    assert_stopped(seen)


def test_a_port_in_use(python):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = first_answer(python, "--once", "--port", str(port), "--model", "good")
    assert done.returncode == 1
    assert done.stderr == f"port {port} is in use; free it, or choose another with --port\n"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("dies", "the server ended with exit code 1; its message is above"),
        ("base", "the server answered 400: .*no chat template"),
        ("breaks", "the server reported an error: .*engine died"),
        ("mute", "the answer was empty"),
    ],
)
def test_failures_are_told_and_nothing_is_left_running(python, model, reason):
    done = first_answer(python, "--once", "--model", model)
    assert done.returncode == 1
    assert re.search(reason, done.stderr)
    if model != "dies":
        assert_stopped(done.stdout)
