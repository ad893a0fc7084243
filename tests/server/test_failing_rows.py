"""B34: what is not a number never reaches the JSON, and a row that fails fails alone."""

import asyncio
import math
from typing import Any

import pytest

from jaxserve.engine.request import Request, TokenEvent, TokenLogprobs
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, serve

BAD_PROMPT = "nan please"
REASON = "the model's logits are not numbers (NaN) for this request"


class InfiniteEngine(FakeEngine):
    """Alternatives that a filter or a bias has made impossible."""

    @staticmethod
    def _logprobs(token: int, num_top: int) -> TokenLogprobs:
        top = [(token, -0.0), *((other, -math.inf) for other in range(num_top - 1))]
        return TokenLogprobs(-0.0, 1, tuple(top[:num_top]))


class FailingEngine(FakeEngine):
    """Rows whose prompt is BAD_PROMPT fail after two tokens."""

    def _advance(self, request: Request) -> TokenEvent:
        rid = request.request_id
        if bytes(request.prompt_token_ids[1:]) == BAD_PROMPT.encode() and self._emitted[rid] == 2:
            self._free(rid)
            return TokenEvent(rid, (), None, "error", error=REASON)
        return super()._advance(request)


@pytest.mark.parametrize("stream", [False, True])
async def test_b34_minus_infinity_is_the_floor_and_json_is_strict(stream: bool) -> None:
    async with serve(InfiniteEngine(list(b"ab")), ByteModel()) as server:
        body = {"prompt": "x", "max_tokens": 1, "logprobs": 5}
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        chat |= {"top_logprobs": 5, "max_tokens": 1}
        if stream:
            completion = (await server.events("/v1/completions", body))[0]
            message = (await server.events("/v1/chat/completions", chat))[1]
        else:
            completion, message = await server.complete(**body), await server.chat(**chat)
    top = completion["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top["a"] == 0.0
    assert min(top.values()) == -9999.0
    entries = message["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in entries] == [0.0, -9999.0, -9999.0, -9999.0, -9999.0]


async def ask(server: RunningServer, prompt: str) -> tuple[int, Any]:
    return await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 20})


async def test_b34_failed_row_is_an_error_and_its_batchmates_go_on() -> None:
    async with serve(FailingEngine(list(b"fine answer")), ByteModel()) as server:
        server.allowed_statuses = {500}
        _, alone = await ask(server, "good")
        answers = await asyncio.gather(
            *(ask(server, prompt) for prompt in ("good", BAD_PROMPT, "good"))
        )
    (good, first), (bad, error), (_, second) = answers
    assert (good, bad) == (200, 500)
    assert error["error"] == {
        "message": REASON,
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert first["choices"] == second["choices"] == alone["choices"]


async def test_b34_failed_row_ends_its_stream_with_an_error_event() -> None:
    async with serve(FailingEngine(list(b"fine answer")), ByteModel()) as server:
        body = {"prompt": BAD_PROMPT, "max_tokens": 20}
        events = await server.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "fi"
    assert events[-1]["error"]["message"] == REASON
    assert "[DONE]" not in events


async def test_failed_choice_aborts_the_others_of_its_call() -> None:
    engine = FailingEngine(list(b"fine"), step_seconds=0.005)
    async with serve(engine, ByteModel()) as server:
        server.allowed_statuses = {500}
        body = {"prompt": ["good", BAD_PROMPT], "max_tokens": 3000, "ignore_eos": True}
        status, _ = await server.post("/v1/completions", body)
        assert status == 500
        await server.wait_idle()
