"""B40: bodies that are large, compressed, endless or malformed, and the event loop meanwhile."""

import asyncio
import gzip
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.body import parse_json_object
from jaxserve.server.errors import ApiError
from jaxserve.server.settings import ServerSettings
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import serve, strict_json

PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}
LONG = 2_000_000


def long_server(settings: ServerSettings | None = None) -> Any:
    """A server whose model takes prompts of two million tokens."""
    engine = FakeEngine(list(b"fine"), max_model_len=LONG, capacity_tokens=LONG)
    return serve(engine, ByteModel(max_model_len=LONG), settings)


def resident_bytes() -> int:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def longest_stall(work: Callable[[], Awaitable[None]], tries: int = 4) -> float:
    """The longest the event loop did not get to run, beyond what other load on the machine makes
    of an idle one; at best over some tries, since a stall of our own making shows every time."""
    stalls = []
    for _ in range(tries):
        idle = await _watched(lambda: asyncio.sleep(0.3))
        stalls.append(await _watched(work) - idle)
    return min(stalls)


async def _watched(work: Callable[[], Awaitable[None]]) -> float:
    done = asyncio.Event()
    watcher = asyncio.create_task(_watch(done))
    await work()
    done.set()
    return await watcher


async def _watch(done: asyncio.Event) -> float:
    worst = 0.0
    while not done.is_set():
        began = time.perf_counter()
        await asyncio.sleep(0.002)
        worst = max(worst, time.perf_counter() - began - 0.002)
    return worst


@pytest.mark.parametrize("kind", ["text", "token ids", "padding"])
async def test_b40_large_valid_body_is_served_and_the_loop_keeps_running(kind: str) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
    if kind == "text":
        body["prompt"] = "x" * 1_200_000
    elif kind == "token ids":
        body["prompt"] = [100] * 240_000
    else:
        body["user"] = "u" * 1_200_000
    data = json.dumps(body).encode()
    assert len(data) > 1_190_000
    async with long_server() as server:

        async def send() -> None:
            status, answer = await server.post(PATH, data=io.BytesIO(data), headers=JSON)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == "fin"

        assert await longest_stall(send) < 0.1


def send_endless(port: int, head: bytes, chunk: bytes, times: int) -> bytes:
    """Send `head` and then `chunk` over and over; the response, as far as it came."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(head)
        try:
            for _ in range(times):
                sock.sendall(chunk)
        except ConnectionError:
            pass  # the server may stop listening once it has answered
        answer = b""
        while b"}}" not in answer:
            data = sock.recv(65536)
            if not data:
                break
            answer += data
        return answer


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_b40_200_mb_body_is_a_json_413_and_is_not_buffered(declared: bool) -> None:
    piece = b" " * (1 << 20)
    if declared:
        framing, chunk = b"Content-Length: 209715200", piece
    else:
        framing, chunk = b"Transfer-Encoding: chunked", b"100000\r\n" + piece + b"\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + framing
        + b"\r\n\r\n"
    )
    async with long_server() as server:
        before = resident_bytes()
        sending = asyncio.create_task(
            asyncio.to_thread(send_endless, server.port, head, chunk, 200)
        )
        most = 0
        while not sending.done():
            most = max(most, resident_bytes() - before)
            await asyncio.sleep(0.01)
        answer = await sending
        assert server.statuses[-1] == 413
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b" 413 " in headers.splitlines()[0]
    assert b"application/json" in headers
    assert strict_json(body)["error"]["code"] == "request_too_large"
    assert most < 80 << 20


async def test_b40_limit_is_configurable() -> None:
    async with long_server(ServerSettings(max_body_bytes=1000)) as server:
        fits = {"prompt": "x" * 900}
        status, _ = await server.post(PATH, fits)
        assert status == 200
        status, answer = await server.post(PATH, {"prompt": "x" * 1000})
        assert status == 413
        assert "1000 bytes" in answer["error"]["message"]


async def test_b40_curl_is_told_before_it_sends_too_much() -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    )
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    async with long_server() as server:
        refused = await asyncio.to_thread(send_endless, server.port, head % (1 << 30), b"", 0)
        assert refused.startswith(b"HTTP/1.1 413 ")
        server.statuses.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head % len(body))
        assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert (await reader.readuntil(b"}}")).count(b" 200 ") == 1
        writer.close()
        await writer.wait_closed()


async def test_b40_gzip_bomb_is_refused_unopened() -> None:
    bomb = gzip.compress(b" " * (200 << 20), compresslevel=1)
    async with long_server() as server:
        before = resident_bytes()
        headers = JSON | {"Content-Encoding": "gzip"}
        status, answer = await server.post(PATH, data=io.BytesIO(bomb), headers=headers)
        assert resident_bytes() - before < 40 << 20
    assert status == 415
    assert "Content-Encoding" in answer["error"]["message"]


async def test_b40_body_without_content_length_is_served() -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 2}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for byte in data:
            yield bytes([byte])

    async with long_server() as server:
        status, answer = await server.post(PATH, data=pieces(), headers=JSON)
    assert status == 200
    assert answer["choices"][0]["text"] == "fi"


MALFORMED: dict[str, tuple[bytes, int]] = {
    "12k wrong prompts": (json.dumps({"prompt": [{"a": "secret"}] * 12_000}).encode(), 400),
    "12k wrong messages": (json.dumps({"messages": ["secret"] * 12_000}).encode(), 400),
    "12k unknown fields": (json.dumps({f"secret{i}": 1 for i in range(12_000)}).encode(), 400),
    "wrong value": (json.dumps({"prompt": "x", "n": "secret"}).encode(), 400),
    "long wrong value": (json.dumps({"prompt": "x", "n": "secret" * 99_999}).encode(), 400),
    "long wrong list": (json.dumps({"prompt": "x", "top_k": [7] * 99_999}).encode(), 400),
    "long number": (b'{"prompt": [' + b"1" * 4_000 + b"]}", 400),
    "longer number": (b'{"prompt": [' + b"1" * 400_000 + b"]}", 400),
    "too many values": (json.dumps({"prompt": [1] * 400_000}).encode(), 413),
    "deep": (b'{"prompt":' + b"[" * 100_000, 400),
    "deep and closed": (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "cut": (b'{"prompt": "secret', 400),
    "empty": (b"", 400),
    "nan": (b'{"prompt": "x", "temperature": NaN}', 400),
    "infinity": (b'{"prompt": "x", "temperature": 1e999}', 400),
    "array": (b'["secret"]', 400),
    "null": (b"null", 400),
    "latin-1": ('{"prompt": "é"}'.encode("latin-1"), 400),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16"), 400),
    "form": (b"prompt=secret", 400),
}


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_b40_malformed_bodies_get_small_errors_that_echo_nothing(path: str) -> None:
    async with long_server() as server:
        for name, (data, expected) in MALFORMED.items():
            body = io.BytesIO(data)
            async with server.session.post(server.url + path, data=body, headers=JSON) as response:
                text = await response.text()
                assert response.status == expected, (name, text[:200])
                assert response.content_type == "application/json"
            assert len(text) < 1_000, name
            assert "secret" not in text, name
            assert set(strict_json(text)["error"]) == {"message", "type", "param", "code"}


async def test_wrong_content_type_is_a_json_415() -> None:
    async with long_server() as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            status, answer = await server.post(PATH, data=b"{}", headers={"Content-Type": kind})
            assert status == 415
            assert "application/json" in answer["error"]["message"]
        good = {"Content-Type": "application/json; charset=utf-8"}
        data = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        status, _ = await server.post(PATH, data=data, headers=good)
        assert status == 200


async def test_body_that_never_arrives_is_a_408() -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    async with long_server(ServerSettings(body_timeout=0.2)) as server:
        answer = await asyncio.to_thread(send_endless, server.port, head, b"", 0)
    assert answer.startswith(b"HTTP/1.1 408 ")


WORST_BODIES = {
    "one text": b'{"prompt":"' + b"x" * 16_000_000 + b'"}',
    "escapes": b'{"prompt":"' + b"\\n" * 3_000_000 + b'"}',
    "numbers": b'{"prompt":[' + b"1," * 249_000 + b"1]}",
    "keys": b'{"prompt":{' + b",".join(b'"k%d":1' % i for i in range(83_000)) + b"}}",
    "lists": b'{"prompt":[' + b",".join([b"[[]]"] * 49_000) + b"]}",
}


@pytest.mark.parametrize("kind", WORST_BODIES)
def test_b40_no_body_within_the_limits_holds_the_interpreter_for_long(kind: str) -> None:
    """CPU time, not wall time: the parser does not release the GIL, so this is the stall."""
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        parse_json_object(WORST_BODIES[kind])
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.1


def test_parser_counts_before_it_parses() -> None:
    with pytest.raises(ApiError) as caught:
        parse_json_object(b"[" * 300_000)
    assert caught.value.status == 413
