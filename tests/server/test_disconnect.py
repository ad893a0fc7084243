"""B02: a client that hangs up, or does not read, costs nothing from then on."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve.server import answers
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import STATE
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, serve

ENDLESS = {"prompt": "x", "max_tokens": 3_000, "ignore_eos": True}


def raw_request(body: dict[str, Any], path: str) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def hang_up_when(
    server: RunningServer,
    body: dict[str, Any],
    begun: Callable[[], bool],
    path: str = "/v1/completions",
) -> None:
    """Send a request, wait for `begun` and 200 ms more, and close the socket without reading."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request(body, path))
    await server.wait_until(begun)
    await asyncio.sleep(0.2)
    writer.transport.abort()


async def wait_for_no_calls(server: RunningServer, seconds: float = 2.0) -> None:
    await server.wait_until(lambda: not server.app[STATE].calls, seconds)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_b02_fifty_clients_hang_up(stream: bool, path: str) -> None:
    body = ENDLESS | {"stream": stream}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    engine = FakeEngine([65, 66], step_seconds=0.002, max_rows=64)
    async with serve(engine, ByteModel()) as server:

        def begun() -> bool:
            return len(engine.added) == 1 + 50

        await asyncio.gather(*(hang_up_when(server, body, begun, path) for _ in range(50)))
        await server.wait_idle()
        assert all(times == 1 for times in engine.freed.values())
        assert await server.metric("num_requests_running") == 0
        assert await server.metric("num_requests_waiting") == 0
        drawn = await server.metric("generation_tokens_total")
        await asyncio.sleep(0.1)
        assert await server.metric("generation_tokens_total") == drawn
        assert await server.metric("request_success_total", finished_reason="abort") == 50


async def test_b02_hang_up_with_many_choices_frees_them_all() -> None:
    engine = FakeEngine([65], step_seconds=0.002)
    async with serve(engine, ByteModel()) as server:
        body = ENDLESS | {"prompt": ["a", "b", "c"], "n": 4, "stream": True}
        await hang_up_when(server, body, lambda: len(engine.added) == 1 + 12)
        await server.wait_idle()
        assert all(times == 1 for times in engine.freed.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_b02_hang_up_during_a_long_prefill_is_noticed(stream: bool) -> None:
    """No token has come, so nothing is ever written: the connection itself must tell."""
    engine = FakeEngine([65])
    async with serve(engine, ByteModel()) as server:
        engine.step_gate.clear()
        calls = server.app[STATE].calls
        await hang_up_when(server, ENDLESS | {"stream": stream}, lambda: bool(calls))
        await wait_for_no_calls(server)
        engine.step_gate.set()
        await server.wait_idle()


async def test_b02_hang_up_while_the_prompt_is_tokenised() -> None:
    tokenising, go_on = threading.Event(), threading.Event()
    engine = FakeEngine([65])
    model = ByteModel()
    encode = model.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "slow":
            tokenising.set()
            go_on.wait(20)
        return encode(text, add_special_tokens)

    model.tokenizer.encode = slow  # type: ignore[method-assign]
    async with serve(engine, model) as server:
        await hang_up_when(server, ENDLESS | {"prompt": "slow"}, tokenising.is_set)
        await wait_for_no_calls(server)
        go_on.set()
        await server.complete(prompt="x", max_tokens=1)  # a worker has got past the slow one
        assert len(engine.added) == 2  # the probe and this one


@contextmanager
def client_that_reads_nothing(port: int, body: dict[str, Any]) -> Iterator[None]:
    """A client with a small receive buffer that has sent a request."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(raw_request(body, "/v1/completions"))
        yield


FLOOD = ENDLESS | {"stream": True, "logprobs": 20, "max_tokens": 90_000, "n": 2}


def flooding_engine() -> FakeEngine:
    """4,000 tokens with 20 logprobs each a second: about 5 MB of events."""
    return FakeEngine([65], max_model_len=100_000, tokens_per_step=20, step_seconds=0.01)


@pytest.mark.slow
async def test_reader_that_stops_is_cut_off_after_the_write_timeout() -> None:
    settings = ServerSettings(write_timeout=0.3)
    model = ByteModel(max_model_len=100_000)
    async with serve(flooding_engine(), model, settings) as server:
        with client_that_reads_nothing(server.port, FLOOD):
            await server.wait_until(lambda: bool(server.app[STATE].calls))
            await wait_for_no_calls(server, 20)
        await server.wait_idle(5)


@pytest.mark.slow
async def test_reader_that_lags_too_far_is_dropped_and_slows_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_STREAM_BACKLOG", 5_000)
    model = ByteModel(max_model_len=100_000)
    async with serve(flooding_engine(), model) as server:
        with client_that_reads_nothing(server.port, FLOOD):
            await server.wait_until(lambda: bool(server.app[STATE].calls))
            began = time.monotonic()
            await server.complete(prompt="y", max_tokens=500, ignore_eos=True)
            assert time.monotonic() - began < 5
            await wait_for_no_calls(server, 20)
        await server.wait_idle(5)
