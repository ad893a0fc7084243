"""B58: /health says what is true, at once, whatever the engine does."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.app import attach, drain, make_loading_app
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import STATE
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, parse_events, serve, serve_app

BODY = {"prompt": "x", "max_tokens": 3_000, "ignore_eos": True}


async def health(server: RunningServer) -> tuple[int, str | None]:
    """Status of /health and the code of its error."""
    status, answer = await server.get("/health")
    return status, answer["error"]["code"] if "error" in answer else None


async def health_becomes(server: RunningServer, expected: tuple[int, str | None]) -> float:
    """Seconds until /health says so."""
    began = time.monotonic()
    while await health(server) != expected:
        assert time.monotonic() - began < 5, await health(server)
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_b58_loading_is_503_everywhere_until_the_model_is_attached() -> None:
    settings = ServerSettings()
    app = make_loading_app(settings, ServerMetrics("fake"), "fake")
    async with serve_app(app, None) as server:
        assert await health(server) == (503, "loading")
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = await server.post(path, {"prompt": "x"})
            assert (status, answer["error"]["code"]) == (503, "loading")
        status, models = await server.get("/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "fake")
        assert models["data"][0]["max_model_len"] is None
        assert (await server.get("/metrics"))[0] == 200
        async with serve(FakeEngine(list(b"hi")), ByteModel()) as other:
            attach(app, other.client, ByteModel())
            assert await health(server) == (200, None)
            answer = await server.complete(prompt="x")
            assert answer["choices"][0]["text"] == "hi"


async def test_b58_failed_loading_is_503_with_the_reason() -> None:
    app = make_loading_app(ServerSettings(), ServerMetrics("fake"), "fake")
    app[STATE].failure = "tensor blk.0.attn_q.weight is missing"
    async with serve_app(app, None) as server:
        status, answer = await server.get("/health")
    assert (status, answer["error"]["code"]) == (503, "load_failed")
    assert "blk.0" in answer["error"]["message"]


async def read_stream(server: RunningServer) -> list[Any]:
    async with server.session.post(
        server.url + "/v1/completions", json=BODY | {"stream": True}
    ) as response:
        return parse_events(await response.read())


async def test_b58_clients_of_a_dying_engine_fail_at_once() -> None:
    engine = FakeEngine([65], step_seconds=0.01, fail_at_step=20)
    engine.step_gate.clear()
    async with serve(engine, ByteModel(), check_alive=False) as server:
        server.allowed_statuses = {503}
        assert await health(server) == (200, None)
        plain = [server.post("/v1/completions", BODY) for _ in range(4)]
        streams = [read_stream(server) for _ in range(4)]
        asking = asyncio.gather(*plain, *streams)
        await server.wait_inflight(8)
        began = time.monotonic()
        engine.step_gate.set()
        results = await asking
        assert time.monotonic() - began < 5
        for status, answer in results[:4]:
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
        for events in results[4:]:
            assert events[-1]["error"]["code"] == "engine_dead"
            assert "[DONE]" not in events
        assert await health(server) == (503, "engine_dead")
        status, answer = await server.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")


async def test_b58_frozen_engine_is_503_after_the_limit_and_200_again_once_it_moves() -> None:
    engine = FakeEngine([65], step_seconds=0.001)
    settings = ServerSettings(stall_timeout=0.6)
    async with serve(engine, ByteModel(), settings) as server:
        server.allowed_statuses = {503}
        engine.step_gate.clear()
        waiting = asyncio.create_task(server.complete(**BODY | {"max_tokens": 5}))
        await server.wait_inflight(1)
        assert await health(server) == (200, None)
        assert await health_becomes(server, (503, "engine_hung")) > 0.1
        engine.step_gate.set()
        await health_becomes(server, (200, None))
        assert (await waiting)["choices"][0]["text"] == "AAAAA"


async def send_many(url: str, body: bytes, times: int) -> list[int]:
    """Post the same body many times at once, from another process; the answers' statuses."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.post_many", url, str(times)),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate(body)
    return [int(status) for status in printed.split()]


@pytest.mark.slow
async def test_b58_health_answers_within_a_second_under_500_long_prompts() -> None:
    engine = FakeEngine([65], max_model_len=30_000, capacity_tokens=1 << 30, step_seconds=0.001)
    body = json.dumps({"prompt": "word " * 4_000, "max_tokens": 2}).encode()
    async with serve(engine, ByteModel(max_model_len=30_000)) as server:
        url = server.url + "/v1/completions"
        sending = asyncio.create_task(send_many(url, body, 500))
        latencies = []
        while not sending.done():
            began = time.monotonic()
            status, _ = await health(server)
            latencies.append(time.monotonic() - began)
            assert status == 200
            await asyncio.sleep(0.01)
        assert await sending == [200] * 500
    assert len(latencies) > 20
    assert sorted(latencies)[int(0.99 * len(latencies))] < 1.0


async def test_draining_lets_the_running_end_and_refuses_the_new() -> None:
    engine = FakeEngine([65], step_seconds=0.01)
    async with serve(engine, ByteModel(), check_alive=False) as server:
        server.allowed_statuses = {503}
        running = asyncio.create_task(server.complete(prompt="x", max_tokens=80, ignore_eos=True))
        await server.wait_inflight(1)
        draining = asyncio.create_task(drain(server.app, 10))
        await asyncio.sleep(0.05)
        assert await health(server) == (503, "shutting_down")
        status, answer = await server.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert (await running)["usage"]["completion_tokens"] == 80
        await asyncio.wait_for(draining, 2)


async def test_draining_aborts_what_runs_longer_than_the_timeout() -> None:
    engine = FakeEngine([65], step_seconds=0.01)
    async with serve(engine, ByteModel(), check_alive=False) as server:
        plain = asyncio.create_task(server.complete(**BODY))
        stream = asyncio.create_task(read_stream(server))
        await server.wait_inflight(2)
        began = time.monotonic()
        await drain(server.app, 0.2)
        assert time.monotonic() - began < 3
        assert (await plain)["choices"][0]["finish_reason"] == "abort"
        assert (await stream)[-2]["choices"][0]["finish_reason"] == "abort"
