"""Every other way to be refused: paths, methods, keys, full queues; always OpenAI's JSON."""

import asyncio
from typing import Any

import pytest

from jaxserve.server.settings import ServerSettings
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import serve

SCRIPT = list(b"fine")


def check_error(answer: Any, code: str) -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code


async def test_unknown_path_and_wrong_method() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        status, answer = await server.get("/v2/<script>")
        assert status == 404
        check_error(answer, "not_found")
        assert "script" not in answer["error"]["message"]
        async with server.session.get(server.url + "/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            check_error(await response.json(), "method_not_allowed")


async def test_models_and_version() -> None:
    settings = ServerSettings(served_model_names=("short", "org/long-name"))
    async with serve(FakeEngine(SCRIPT), ByteModel(), settings) as server:
        _, models = await server.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["short", "org/long-name"]
        status, card = await server.get("/v1/models/org/long-name")
        assert (status, card["max_model_len"], card["root"]) == (200, 4096, "fake")
        status, answer = await server.get("/v1/models/fake")
        assert status == 404
        check_error(answer, "model_not_found")
        answer = await server.complete(model="org/long-name", prompt="x")
        assert answer["model"] == "short"
        status, answer = await server.get("/version")
        assert status == 200
        assert answer["version"]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Basic secret-key", "Bearer", "secret-key", "Bearer schlüssel"]
)
async def test_api_key_guards_v1(header: str | None) -> None:
    settings = ServerSettings(api_key="secret-key")
    async with serve(FakeEngine(SCRIPT), ByteModel(), settings, check_alive=False) as server:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = await server.post(path, {"prompt": "x"}, headers=headers)
            assert status == 401
            check_error(answer, "invalid_api_key")
            assert "secret" not in str(answer)
        assert (await server.get("/v1/models", headers=headers))[0] == 401
        assert (await server.get("/health"))[0] == 200


async def test_api_key_opens_v1() -> None:
    settings = ServerSettings(api_key="schlüssel")
    async with serve(FakeEngine(SCRIPT), ByteModel(), settings, check_alive=False) as server:
        headers = {"Authorization": "bearer schlüssel"}
        status, _ = await server.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_429_with_retry_after(stream: bool) -> None:
    engine = FakeEngine([65], step_seconds=0.005)
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    async with serve(engine, ByteModel(), max_inflight=2) as server:
        held = [asyncio.create_task(server.post("/v1/completions", body)) for _ in range(2)]
        await server.wait_inflight(2)
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            check_error(await response.json(), "queue_full")
        assert await server.metric("admission_rejections_total") == 1
        text = (await server.get("/metrics"))[1]
        assert 'finished_reason="abort"' not in text  # what was refused did not end
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await server.wait_idle()


async def test_call_that_fits_only_in_part_leaves_nothing_behind() -> None:
    engine = FakeEngine([65], step_seconds=0.005)
    async with serve(engine, ByteModel(), max_inflight=3) as server:
        body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 3000, "ignore_eos": True}
        status, _ = await server.post("/v1/completions", body)
        assert status == 429
        await server.wait_idle()


async def test_too_many_calls_in_flight_is_429_before_the_body_is_read() -> None:
    engine = FakeEngine([65], step_seconds=0.005)
    settings = ServerSettings(max_concurrent_requests=1)
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    async with serve(engine, ByteModel(), settings) as server:
        held = asyncio.create_task(server.post("/v1/completions", body))
        await server.wait_inflight(1)
        status, answer = await server.post("/v1/completions", body)
        assert status == 429
        check_error(answer, "queue_full")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await server.wait_idle()


async def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = ByteModel()
    async with serve(FakeEngine(SCRIPT), model) as server:
        server.allowed_statuses = {500}
        encode = model.tokenizer.encode
        model.tokenizer.encode = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
        status, answer = await server.post("/v1/completions", {"prompt": "x"})
        model.tokenizer.encode = encode  # type: ignore[method-assign]
    assert status == 500
    assert "division" not in answer["error"]["message"]
    assert any(record.exc_info for record in caplog.records)


async def test_access_log_has_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxserve.access")
    settings = ServerSettings(api_key="secret", log_requests=True)
    async with serve(FakeEngine(SCRIPT), ByteModel(), settings, check_alive=False) as server:
        headers = {"Authorization": "Bearer secret"}
        await server.post("/v1/completions", {"prompt": "private"}, headers=headers)
        await server.get("/nowhere")
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    assert len(lines) == 2
    assert "POST /v1/completions" in lines[0]
    assert " 200 " in lines[0]
    assert "GET /nowhere" in lines[1]
    assert " 404 " in lines[1]
    assert not any(word in line for line in lines for word in ("secret", "private"))


async def test_no_access_log_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        await server.complete(prompt="x")
    assert not [r for r in caplog.records if "completions" in r.getMessage()]
