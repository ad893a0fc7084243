"""A request's own time limit and cache salt: checked, handed on, and answered clearly."""

from typing import Any

import pytest

from jaxserve.engine.outputs import MAX_CACHE_SALT, MAX_TIMEOUT
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_completion
from tests.support.running_server import RunningServer, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"max_tokens": 3_000, "ignore_eos": True}


def body(path: str, **fields: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], **fields}
    return {"prompt": "hi", **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_values_are_400_naming_the_field(path: str) -> None:
    engine = FakeEngine(list(b"ab"))
    bad_timeouts = [0, -1, "5", True, [], MAX_TIMEOUT + 1, 10**400]
    bad_salts = [5, "", "x" * (MAX_CACHE_SALT + 1), "\ud800", ["a"]]
    async with serve(engine, ByteModel()) as server:
        for field, values in (("timeout", bad_timeouts), ("cache_salt", bad_salts)):
            for value in values:
                status, answer = await server.post(path, body(path, **{field: value}))
                assert (status, answer["error"]["param"]) == (400, field), value
        for fields in ({"timeout": None, "cache_salt": None}, {"timeout": MAX_TIMEOUT}):
            status, _ = await server.post(path, body(path, max_tokens=1, **fields))
            assert status == 200


async def test_salt_deadline_and_leader_reach_the_engine() -> None:
    engine = FakeEngine(list(b"ab"))
    async with serve(engine, ByteModel(), check_alive=False) as server:
        await server.complete(prompt=["x", "y"], n=3, timeout=50, cache_salt="mine", max_tokens=1)
        await server.chat(messages=[{"role": "user", "content": "x"}], max_tokens=1)
    *first, last = engine.added
    assert {request.cache_salt for request in first} == {"mine"}
    assert all(request.deadline == request.arrival_time + 50 for request in first)
    for prompt in (first[:3], first[3:]):
        leader = prompt[0].request_id
        assert [request.leader_id for request in prompt] == [None, leader, leader]
    assert (last.cache_salt, last.deadline, last.leader_id) == ("", None, None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_was_generated_by_then_is_the_answer(path: str) -> None:
    engine = FakeEngine([65], step_seconds=0.01)
    async with serve(engine, ByteModel()) as server:
        status, answer = await server.post(path, body(path, timeout=0.2, n=2, **ENDLESS))
        assert status == 200
        for choice in answer["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert choice["finish_reason"] == "timeout"
            assert set(text) == {"A"}
        assert 2 <= answer["usage"]["completion_tokens"] <= 42
        assert await server.metric("request_success_total", finished_reason="timeout") == 2
        await server.wait_idle()


async def test_a_stream_ends_with_the_same_reason() -> None:
    async with serve(FakeEngine([65], step_seconds=0.01), ByteModel()) as server:
        events = await server.events(COMPLETIONS, body(COMPLETIONS, timeout=0.2, **ENDLESS))
    assert events[-1] == "[DONE]"
    (choice,) = merge_completion(events)["choices"]
    assert choice["finish_reason"] == "timeout"
    assert set(choice["text"]) == {"A"}


async def busy(server: RunningServer) -> None:
    """Fill the only row with a request that goes on for long."""
    await server.session.post(
        server.url + COMPLETIONS, json=body(COMPLETIONS, stream=True, **ENDLESS)
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_nothing_generated_is_a_408_that_says_so(path: str) -> None:
    engine = FakeEngine([65], step_seconds=0.01, max_rows=1)
    async with serve(engine, ByteModel(), check_alive=False) as server:
        await busy(server)
        late = body(path, timeout=0.1, n=2, **ENDLESS)
        async with server.session.post(server.url + path, json=late) as response:
            answer = await response.json()
            assert response.status == 408
            assert response.headers["x-should-retry"] == "false"  # OpenAI's client would
        error = answer["error"]
        assert (error["param"], error["code"]) == ("timeout", "generation_timeout")
        assert "before a token was generated" in error["message"]
        events = await server.events(path, late)
        assert events[-1]["error"] == error
        assert not any(
            choice["finish_reason"] for event in events for choice in event.get("choices", ())
        )
        assert server.client.num_inflight == 1  # the busy one


async def test_a_call_keeps_what_some_of_its_prompts_have() -> None:
    """One row: the first prompt ends, the second is still waiting when the time is over."""
    engine = FakeEngine([65], step_seconds=0.01, max_rows=1)
    fields = {"prompt": ["x", "y"], "timeout": 0.3, **ENDLESS}
    async with serve(engine, ByteModel(), check_alive=False) as server:
        plain = await server.complete(**fields)
        streamed = merge_completion(await server.events(COMPLETIONS, fields))
    for answer in (plain, streamed):
        first, second = answer["choices"]
        assert set(first["text"]) == {"A"}
        assert second["text"] == ""
        assert [first["finish_reason"], second["finish_reason"]] == ["timeout", "timeout"]
