"""POST /v1/chat/completions: shapes, templates, streams."""

from dataclasses import replace

import pytest

from tests.support.byte_model import BOS, ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_chat, without_identity
from tests.support.running_server import serve

SCRIPT = list("héllo, wörld! A line\nand another".encode())
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


async def test_plain_response_has_openai_shape() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.chat(model="fake", messages=HELLO, max_tokens=6)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "héllo", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    prompt = "<s>user: Hello\nassistant:"
    assert answer["usage"]["prompt_tokens"] == len(prompt) - len("<s>") + 1
    assert answer["usage"]["completion_tokens"] == 6


async def test_logprobs_follow_openai() -> None:
    async with serve(FakeEngine(list(b"ab")), ByteModel()) as server:
        answer = await server.chat(messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
        bare = await server.chat(messages=HELLO, max_tokens=1, logprobs=True)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first == {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [
            {"token": "\x00", "logprob": -0.5, "bytes": [0]},
            {"token": "a", "logprob": -1.0, "bytes": [97]},
        ],
    }
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_top_logprobs_leave_out_a_drawn_token_that_is_not_among_them() -> None:
    async with serve(FakeEngine(list(b"ab")), ByteModel()) as server:
        answer = await server.chat(messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=1)
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["token"] for entry in top] == ["\x00"]


VARIANTS = {
    "plain": {"max_tokens": 9},
    "stop": {"stop": ["wörld"]},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 5},
    "n 3 with ids": {"n": 3, "max_tokens": 6, "return_token_ids": True},
    "half a character at the end": {"max_tokens": 2},
    "until eos": {},
}


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_stream_merges_to_the_plain_response(variant: str, tokens_per_step: int) -> None:
    body = {"messages": HELLO} | VARIANTS[variant]
    async with serve(FakeEngine(SCRIPT, tokens_per_step=tokens_per_step), ByteModel()) as server:
        plain = await server.chat(**body)
        with_usage = body | {"stream_options": {"include_usage": True}}
        merged = merge_chat(await server.events("/v1/chat/completions", with_usage))
    assert without_identity(merged) == without_identity(plain)


@pytest.mark.parametrize("stream", [False, True])
async def test_b04_chat_prompt_has_exactly_one_bos(stream: bool) -> None:
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        await server.post("/v1/chat/completions", {"messages": HELLO, "stream": stream})
        ids = engine.added[-1].prompt_token_ids
    assert ids == (BOS, *b"user: Hello\nassistant:")


async def test_b04_raw_completion_keeps_its_one_bos() -> None:
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        await server.complete(prompt="hi")
        assert engine.added[-1].prompt_token_ids == (BOS, *b"hi")
        await server.complete(prompt="hi", add_special_tokens=False)
        assert engine.added[-1].prompt_token_ids == tuple(b"hi")


async def test_template_sees_tools_kwargs_and_parts() -> None:
    engine = FakeEngine(SCRIPT)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    async with serve(engine, ByteModel()) as server:
        await server.chat(
            messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
            tools=[TOOL],
            tool_choice="auto",
            chat_template_kwargs={"mood": "calm"},
            add_generation_prompt=False,
        )
        text = bytes(engine.added[-1].prompt_token_ids[1:]).decode()
        assert text == "tool clock\nmood=calm\nuser: one \ntwo\nassistant: "
        await server.chat(messages=HELLO, tools=[TOOL], tool_choice="none")
        text = bytes(engine.added[-1].prompt_token_ids[1:]).decode()
    assert "clock" not in text


async def test_template_refusal_is_a_400_with_its_text() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        status, answer = await server.post(
            "/v1/chat/completions", {"messages": [{"role": "forbidden", "content": "x"}]}
        )
    assert status == 400
    assert "refuses this role" in answer["error"]["message"]


async def test_base_model_without_template_refuses_chat_clearly() -> None:
    model = replace(ByteModel(), chat_template=None)
    async with serve(FakeEngine(SCRIPT), model) as server:
        status, answer = await server.post("/v1/chat/completions", {"messages": HELLO})
    assert status == 400
    assert answer["error"]["code"] == "no_chat_template"
    assert "/v1/completions" in answer["error"]["message"]


async def test_absent_max_tokens_runs_to_the_end_of_the_context() -> None:
    engine = FakeEngine([65], max_model_len=100)
    async with serve(engine, ByteModel(max_model_len=100)) as server:
        answer = await server.chat(messages=HELLO, ignore_eos=True)
    usage = answer["usage"]
    assert usage["total_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"
