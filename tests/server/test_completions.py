"""POST /v1/completions: shapes, and a stream that equals the plain response field by field."""

import time

import pytest

from tests.support.byte_model import EOS, ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_completion, without_identity
from tests.support.running_server import serve

SCRIPT = list("héllo, wörld! A line\nand another".encode())


async def test_plain_response_has_openai_shape() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(model="fake", prompt="hi", max_tokens=6)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert abs(answer["created"] - time.time()) < 60
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "héllo",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,  # BOS and two bytes
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_ends_at_eos_by_itself() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(prompt="hi", max_tokens=1000, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["text"] == bytes(SCRIPT).decode()
    assert choice["token_ids"] == [*SCRIPT, EOS]
    assert choice["prompt_token_ids"] == [256, *b"hi"]


async def test_default_max_tokens_is_16() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(prompt="hi")
    assert answer["usage"]["completion_tokens"] == 16


async def test_echo_repeats_the_prompt_in_front() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        by_text = await server.complete(prompt="Say: ", max_tokens=1, echo=True)
        by_ids = await server.complete(prompt=list(b"Say: "), max_tokens=1, echo=True)
    assert by_text["choices"][0]["text"] == "Say: h"
    assert by_ids["choices"][0]["text"] == "Say: h"


async def test_logprobs_list_tokens_alternatives_and_offsets() -> None:
    async with serve(FakeEngine(list(b"abc")), ByteModel()) as server:
        answer = await server.complete(prompt="x", max_tokens=3, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0, -1.0]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, "\x00": -0.5}


async def test_stop_token_id_is_the_stop_reason() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.complete(prompt="x", max_tokens=50, stop_token_ids=[ord(",")])
    assert answer["choices"][0]["text"] == "héllo"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == ord(",")


VARIANTS = {
    "plain": {},
    "stop string": {"stop": ["\nand", "never"], "max_tokens": 100},
    "stop string kept": {"stop": "wör", "include_stop_str_in_output": True, "max_tokens": 100},
    "logprobs": {"logprobs": 3, "max_tokens": 9},
    "logprobs 0": {"logprobs": 0, "max_tokens": 4},
    "echo": {"echo": True, "max_tokens": 5},
    "ids": {"return_token_ids": True, "max_tokens": 9},
    "half a character at the end": {"max_tokens": 2, "return_token_ids": True},
    "until eos": {"max_tokens": 400},
    "n 3": {"n": 3, "max_tokens": 7},
    "two prompts, n 2": {
        "prompt": ["one", "three"],
        "n": 2,
        "max_tokens": 7,
        "echo": True,
        "return_token_ids": True,
    },
}


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_stream_merges_to_the_plain_response(variant: str, tokens_per_step: int) -> None:
    body = {"prompt": "Once"} | VARIANTS[variant]
    engine = FakeEngine(SCRIPT, tokens_per_step=tokens_per_step)
    async with serve(engine, ByteModel()) as server:
        plain = await server.complete(**body)
        with_usage = body | {"stream_options": {"include_usage": True}}
        merged = merge_completion(await server.events("/v1/completions", with_usage))
    assert without_identity(merged) == without_identity(plain)


async def test_stream_sends_tokens_as_they_come() -> None:
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        events = await server.events("/v1/completions", {"prompt": "x", "max_tokens": 5})
        chunk_texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(chunk_texts) == "héll"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_model_defaults_apply_where_the_body_is_silent() -> None:
    engine = FakeEngine(SCRIPT)
    model = ByteModel(sampling_defaults={"temperature": 0.25, "top_k": 7})
    async with serve(engine, model) as server:
        await server.complete(prompt="x", top_k=3, temperature=None)
        params = engine.added[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 3, 1.0)


async def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 42,
        "stop": ["zzz"],
        "stop_token_ids": [255],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
    }
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        await server.complete(prompt="x", logit_bias={"5": -100}, priority=3, **fields)
        request = engine.added[-1]
    sent = {name: getattr(request.params, name) for name in fields}
    expected = fields | {"stop": ("zzz",), "stop_token_ids": (255,)}
    assert sent == expected
    assert request.params.logit_bias == {5: -100.0}
    assert request.priority == 3
