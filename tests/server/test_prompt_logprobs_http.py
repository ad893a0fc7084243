"""Logprobs of prompts over HTTP: `prompt_logprobs`, and `echo` with `logprobs`."""

import json
from typing import Any

import pytest

from jaxserve.engine.request import PromptLogprobs, Request
from tests.support.byte_model import ByteModel, ByteTokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_chat, merge_completion, without_identity
from tests.support.running_server import serve

SCRIPT = list("héllo".encode())
BOS = "256"


def entry(token: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


async def test_completions_have_vllms_field() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(prompt="hi", max_tokens=1, prompt_logprobs=2)
    choice = answer["choices"][0]
    assert choice["text"] == "h"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {str(ord("h")): entry("h", -1.0, 2), "0": entry("\x00", -0.5, 1)},
        {str(ord("i")): entry("i", -2.0, 2), "0": entry("\x00", -1.5, 1)},
    ]


async def test_zero_gives_the_token_itself_and_absent_gives_no_field() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        zero = await server.complete(prompt="h", max_tokens=1, prompt_logprobs=0)
        absent = await server.complete(prompt="h", max_tokens=1)
        null = await server.complete(prompt="h", max_tokens=1, prompt_logprobs=None)
    assert zero["choices"][0]["prompt_logprobs"] == [None, {"104": entry("h", -1.0, 2)}]
    assert "prompt_logprobs" not in absent["choices"][0] | null["choices"][0]


async def test_chat_has_it_once_around_the_choices() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.chat(messages=messages, max_tokens=2, n=2, prompt_logprobs=0)
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert "".join(one["decoded_token"] for e in rest for one in e.values()) == (
        "user: hi\nassistant:"
    )


async def test_echo_with_logprobs_puts_the_prompt_in_front() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(prompt="hi", max_tokens=2, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "hih\ufffd"
    assert "prompt_logprobs" not in choice
    assert choice["logprobs"] == {
        "tokens": ["<s>", "h", "i", "h", "\ufffd"],
        "token_logprobs": [None, -1.0, -2.0, -1.0, -1.0],
        "top_logprobs": [
            None,
            {"h": -1.0, "\x00": -0.5},
            {"i": -2.0, "\x00": -1.5},
            {"h": -1.0, "\x00": -0.5},
            {"\ufffd": -1.0, "\x00": -0.5},
        ],
        "text_offset": [0, 0, 1, 2, 3],  # BOS is no part of the text
    }


async def test_echo_and_the_field_have_each_their_own_number_of_alternatives() -> None:
    fields = {"prompt": "hi", "max_tokens": 1, "echo": True, "logprobs": 0}
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        more = await server.complete(**fields, prompt_logprobs=3)
        fewer = await server.complete(**(fields | {"logprobs": 3}), prompt_logprobs=0)
    for answer, field, echoed in ((more, 3, 1), (fewer, 1, 3)):
        choice = answer["choices"][0]
        assert [len(one) for one in choice["prompt_logprobs"][1:]] == [field] * 2
        assert [len(one) for one in choice["logprobs"]["top_logprobs"][1:3]] == [echoed] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_scores_the_prompt_alone(stream: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        if stream:
            body["stream_options"] = {"include_usage": True}
            answer = merge_completion(await server.events("/v1/completions", body))
        else:
            answer = await server.complete(**body)
    choice = answer["choices"][0]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["token_ids"] == []
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 3


async def test_max_tokens_0_hides_an_end_of_text_too() -> None:
    async with serve(FakeEngine([]), ByteModel()) as server:
        answer = await server.complete(prompt="hi", max_tokens=0, echo=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("hi", "length", None)


VARIANTS: dict[str, dict[str, Any]] = {
    "field": {"prompt_logprobs": 2},
    "field and logprobs": {"prompt_logprobs": 1, "logprobs": 2},
    "echo": {"echo": True, "logprobs": 2},
    "echo, n 3": {"echo": True, "logprobs": 2, "n": 3},
    "all": {
        "prompt": ["one", "two"],
        "echo": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "n": 2,
        "return_token_ids": True,
    },
    "nothing of the output": {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 0},
    "a stop string": {"echo": True, "logprobs": 0, "stop": "llo"},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_streams_merge_to_the_plain_response(variant: str) -> None:
    body = {"prompt": "Once", "max_tokens": 5} | VARIANTS[variant]
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        plain = await server.complete(**body)
        with_usage = body | {"stream_options": {"include_usage": True}}
        merged = merge_completion(await server.events("/v1/completions", with_usage))
    assert without_identity(merged) == without_identity(plain)


async def test_chat_streams_merge_to_the_plain_response() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "n": 2,
        "prompt_logprobs": 2,
    }
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        plain = await server.chat(**body)
        with_usage = body | {"stream_options": {"include_usage": True}}
        merged = merge_chat(await server.events("/v1/chat/completions", with_usage))
    assert without_identity(merged) == without_identity(plain)


async def test_b34_impossible_prompt_tokens_are_strict_json() -> None:
    class Impossible(FakeEngine):
        @staticmethod
        def _prompt_logprobs(request: Request) -> PromptLogprobs | None:
            raw = FakeEngine._prompt_logprobs(request)
            if raw is not None:
                raw.logprobs[:] = float("-inf")
                raw.top_logprobs[:, 1:] = float("-inf")
            return raw

    async with serve(Impossible(SCRIPT), ByteModel()) as server:
        answer = await server.complete(
            prompt="hi", max_tokens=1, echo=True, logprobs=3, prompt_logprobs=3
        )
    choice = answer["choices"][0]
    assert choice["logprobs"]["token_logprobs"][1] == -9999.0
    assert choice["prompt_logprobs"][1]["104"]["logprob"] == -9999.0
    json.dumps(answer, allow_nan=False)


async def test_offsets_of_halves_of_characters_and_written_special_tokens() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel(tokenizer=ByteTokenizer(False))) as server:
        fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
        half = await server.complete(prompt="éa", **fields)
        written = await server.complete(prompt="a<s>b", **fields)
    assert half["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]
    assert written["choices"][0]["logprobs"]["text_offset"] == [0, 1, 4]
