"""Requests that must be refused with a 400 that names the field, and change nothing."""

import json
from typing import Any

import pytest

from jaxserve.server.errors import ApiError
from jaxserve.server.protocol import parse_chat
from tests.support.byte_model import BOS, VOCAB_SIZE, ByteModel, ByteTokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import RunningServer, serve

SCRIPT = list(b"fine")
HELLO = [{"role": "user", "content": "Hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX = 64


async def refused(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error object of a request that must be refused, streamed or not, in the same words."""
    status, answer = await server.post(path, body)
    assert status == 400, (body, answer)
    stream_status, stream_answer = await server.post(path, body | {"stream": True})
    assert (stream_status, stream_answer) == (status, answer)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], ""),
    ([[]], ""),
    ([-1], "-1"),
    ([VOCAB_SIZE], str(VOCAB_SIZE)),
    ([5279552648203111001], "5279552648203111001"),
    ([[1], [VOCAB_SIZE + 7]], str(VOCAB_SIZE + 7)),
    ([1, True], "true"),
    ([1.0], "1.0"),
    ([None], "null"),
    (["a", 1], "a string"),
    ([["a"]], "a string"),
    ([[[1]]], "a list"),
    (None, ""),
    (7, ""),
    ({}, ""),
    ("half \ud83d a pair", "surrogate"),
]


async def test_b06_bad_prompts_are_400_naming_id_and_vocabulary() -> None:
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        for prompt, shown in BAD_PROMPTS:
            error = await refused(server, COMPLETIONS, {"prompt": prompt})
            assert error["param"] == "prompt", prompt
            assert shown in error["message"], (prompt, error)
            if shown.lstrip("-").isdigit():
                assert f"{VOCAB_SIZE} ids" in error["message"]
        assert len(engine.added) == 1  # the probe


@pytest.mark.parametrize("prompt", ["", [""]])
async def test_b06_empty_text_is_bos_alone_or_400(prompt: Any) -> None:
    engine = FakeEngine(SCRIPT)
    async with serve(engine, ByteModel()) as server:
        answer = await server.complete(prompt=prompt)
        assert answer["usage"]["prompt_tokens"] == 1
        assert engine.added[-1].prompt_token_ids == (BOS,)
        error = await refused(server, COMPLETIONS, {"prompt": prompt, "add_special_tokens": False})
        assert "empty" in error["message"]
    async with serve(FakeEngine(SCRIPT), ByteModel(tokenizer=ByteTokenizer(add_bos=False))) as bare:
        error = await refused(bare, COMPLETIONS, {"prompt": prompt})
        assert error["param"] == "prompt"


# (prompt tokens, max_tokens or None) -> completion tokens of a 200, or None for a 400
B14_TABLE = [
    (MAX - 1, None, 1),
    (MAX - 1, 1, 1),
    (MAX - 1, 2, None),
    (MAX, None, None),
    (MAX, 1, None),
    (MAX + 1, None, None),
    (10, MAX, None),
    (10, MAX - 10, MAX - 10),
    (MAX - 5, None, 5),
    (10, None, 16),
]


@pytest.mark.parametrize(("num_prompt", "max_tokens", "expected"), B14_TABLE)
async def test_b14_lengths_are_exact_and_nothing_is_cut(
    num_prompt: int, max_tokens: int | None, expected: int | None
) -> None:
    engine = FakeEngine([65], max_model_len=MAX)
    async with serve(engine, ByteModel(max_model_len=MAX)) as server:
        body = {"prompt": [66] * num_prompt, "max_tokens": max_tokens, "ignore_eos": True}
        if expected is None:
            error = await refused(server, COMPLETIONS, body)
            assert error["code"] == "context_length_exceeded"
            assert str(num_prompt) in error["message"]
            assert str(MAX) in error["message"]
            return
        answer = await server.complete(**body)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_b14_chat_counts_the_rendered_prompt() -> None:
    overhead = len("user: \nassistant:") + 1
    async with serve(FakeEngine([65], max_model_len=MAX), ByteModel(max_model_len=MAX)) as server:
        for num_chars, num_output in ((MAX - 5 - overhead, 5), (MAX - 1 - overhead, 1)):
            messages = [{"role": "user", "content": "x" * num_chars}]
            answer = await server.chat(messages=messages, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == num_output
            assert answer["usage"]["total_tokens"] == MAX
        messages = [{"role": "user", "content": "x" * (MAX - overhead)}]
        error = await refused(server, CHAT, {"messages": messages})
        assert error["param"] == "messages"
        assert f"{MAX} tokens" in error["message"]


@pytest.mark.parametrize("num_chars", [MAX, 16 * MAX + 1, 40 * MAX, 256 * MAX + 1, 1_000_000])
async def test_b14_far_too_long_texts_are_refused_without_being_tokenised_whole(
    num_chars: int,
) -> None:
    tokenizer = ByteTokenizer()
    lengths = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **kw: lengths.append(len(text)) or encode(text, **kw)  # type: ignore[method-assign]
    async with serve(FakeEngine(SCRIPT), ByteModel(max_model_len=MAX, tokenizer=tokenizer)) as srv:
        lengths.clear()
        error = await refused(srv, COMPLETIONS, {"prompt": "x" * num_chars})
        assert error["code"] == "context_length_exceeded"
        assert max(lengths, default=0) <= 16 * MAX


BAD_FIELDS: list[tuple[str, Any]] = [
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("min_p", 1.1),
    ("temperature", -1),
    ("temperature", "hot"),
    ("n", 0),
    ("n", 1000),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["x"] * 100),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [True]),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", [1]),
    ("presence_penalty", 3),
    ("frequency_penalty", "x"),
    ("repetition_penalty", 0),
    ("stream", 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 0),
    ("priority", 1.5),
    ("use_beam_search", True),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("bad_words", ["x"]),
    ("allowed_token_ids", [1]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("prompt_logprobs", "5"),
    ("truncate_prompt_tokens", 5),
    ("stream_options", 5),
]
B32_FIELDS = {"top_k", "top_p", "min_p"}
B38_FIELDS = {"logit_bias", "stop", "stop_token_ids"}


async def check_bad_fields(path: str, base: dict[str, Any], fields: set[str] | None) -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        for name, value in BAD_FIELDS:
            if (fields is None) == (name in B32_FIELDS | B38_FIELDS):
                continue
            if fields is not None and name not in fields:
                continue
            status, answer = await server.post(path, base | {name: value})
            assert status == 400, (name, value, answer)
            assert answer["error"]["param"] == name, (name, value, answer)
            assert name in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "base"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})]
)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(B32_FIELDS, id="b32_filters"),
        pytest.param(B38_FIELDS, id="b38_bias_and_stop"),
        pytest.param(None, id="the_rest"),
    ],
)
async def test_bad_fields_are_400_naming_them(
    path: str, base: dict[str, Any], fields: set[str] | None
) -> None:
    await check_bad_fields(path, base, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": VOCAB_SIZE + 5},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"min_p": 0},
        {"stop": None},
        {"stop": []},
        {"logit_bias": {"5": -100, "6": 100.0}},
        {"temperature": 0},
        {"suffix": None, "best_of": 1, "response_format": {"type": "text"}, "user": "me"},
    ],
)
async def test_b32_b38_edges_that_are_allowed(fields: dict[str, Any]) -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        await server.complete(prompt="x", **fields)


COMPLETION_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": False, "echo": True}, "max_tokens"),
    ({"prompt_logprobs": 20, "n": 128, "prompt": "x" * 2_000}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 1024, "n": 2}, "n"),
    ({"logprobs": 20, "n": 128, "max_tokens": 4000}, "logprobs"),
]


async def test_completion_fields_that_cannot_be_served() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        for fields, param in COMPLETION_ONLY:
            status, answer = await server.post(COMPLETIONS, {"prompt": "x"} | fields)
            assert status == 400, (fields, answer)
            assert answer["error"]["param"] == param, (fields, answer)


CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"functions": [{}]}, "functions"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"messages": ["x"] * 5_000}, "messages"),
]


async def test_chat_fields_that_cannot_be_served() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        for fields, param in CHAT_ONLY:
            error = await refused(server, CHAT, {"messages": HELLO} | fields)
            assert error["param"].partition("[")[0] == param, (fields, error)


async def test_max_completion_tokens_wins_over_max_tokens() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        answer = await server.chat(messages=HELLO, max_tokens=1, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_unknown_fields_are_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        await server.complete(prompt="x", frobnicate=True, **{"y" * 500: "secret"})
    lines = [r.getMessage() for r in caplog.records if "unknown request field" in r.getMessage()]
    assert len(lines) == 1
    assert "'frobnicate'" in lines[0]
    assert "secret" not in lines[0]
    assert len(lines[0]) < 200


async def test_unknown_model_is_a_404_in_openai_form() -> None:
    async with serve(FakeEngine(SCRIPT), ByteModel()) as server:
        status, answer = await server.post(COMPLETIONS, {"model": "gpt-9", "prompt": "x"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "fake" in answer["error"]["message"]
        assert "gpt-9" not in json.dumps(answer)


@pytest.mark.parametrize("field", [{"best_of": 2}, {"suffix": "x"}])
def test_chat_refuses_what_would_change_the_answer(field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **field}
    with pytest.raises(ApiError) as caught:
        parse_chat(body, {})
    assert caught.value.status == 400
    assert next(iter(field)) in str(caught.value)
