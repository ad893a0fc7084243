"""Whatever JSON a client sends, it becomes a checked request or a 4xx that names a field."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.outputs import GenerationRequest
from jaxserve.server.body import parse_json_object
from jaxserve.server.errors import as_api_error
from jaxserve.server.prompts import PreparedCall, prepare_chat, prepare_completion
from jaxserve.server.protocol import (
    CHAT_FIELDS,
    CHAT_UNSUPPORTED,
    COMPLETION_FIELDS,
    COMPLETION_UNSUPPORTED,
    parse_chat,
    parse_completion,
)
from tests.support.byte_model import VOCAB_SIZE, ByteModel

MODEL = ByteModel(max_model_len=64)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**40])
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["none", "auto", "required", "text", "user", "assistant", "\ud83d"])
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "forbidden"]) | scalars,
            "content": scalars
            | st.lists(
                st.fixed_dictionaries(
                    {}, optional={"type": st.just("text") | scalars, "text": scalars}
                )
                | scalars,
                max_size=3,
            ),
            "tool_calls": scalars | st.lists(st.dictionaries(st.text(max_size=4), scalars)),
        },
    )
    | scalars,
    max_size=3,
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def bodies(known: frozenset[str], unsupported: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted([*known, *unsupported])
    some = st.dictionaries(st.sampled_from(names) | st.text(max_size=4), values, max_size=6)
    usual = st.fixed_dictionaries(
        {},
        optional={
            "prompt": values | st.lists(st.integers(-1, VOCAB_SIZE), max_size=5),
            "messages": messages,
            "max_tokens": st.integers(1, 40),
            "n": st.integers(1, 3),
            "logprobs": st.booleans() | st.integers(0, 20),
        },
    )
    return st.builds(lambda one, two: one | two, some, usual)


def check_outcome(call: Callable[[], PreparedCall]) -> None:
    """The call prepares requests that fit, or raises what becomes a small 4xx."""
    prepared = None
    error: Exception | None = None
    try:
        prepared = call()
    except Exception as raised:
        error = raised
    if prepared is None:
        assert error is not None
        answer = as_api_error(error)
        assert 400 <= answer.status < 500, error
        assert len(json.dumps(answer.body())) < 1_000
        assert answer.param, error
        return
    for request in prepared.requests:
        assert isinstance(request, GenerationRequest)
        assert request.params.max_tokens is not None
        assert request.prompt_token_ids
        assert len(request.prompt_token_ids) + request.params.max_tokens <= MODEL.max_model_len
        assert all(0 <= token < VOCAB_SIZE for token in request.prompt_token_ids)


def as_sent(body: dict[str, Any]) -> dict[str, Any]:
    """The body as the server parses it."""
    return parse_json_object(json.dumps(body).replace("Infinity", "1e999").encode())


@settings(max_examples=150, deadline=None)
@given(bodies(COMPLETION_FIELDS, COMPLETION_UNSUPPORTED))
def test_any_completion_body(body: dict[str, Any]) -> None:
    parsed = as_sent(body)
    check_outcome(lambda: prepare_completion(parse_completion(parsed, {}), MODEL, "id"))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(bodies(CHAT_FIELDS, CHAT_UNSUPPORTED))
def test_any_chat_body(body: dict[str, Any]) -> None:
    parsed = as_sent(body)
    check_outcome(lambda: prepare_chat(parse_chat(parsed, {}), MODEL, "id"))  # type: ignore[arg-type]
