"""B43: usage in streams and with n, counted against the tokenizer."""

from typing import Any

import pytest

from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_completion
from tests.support.running_server import serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCRIPTS = {"one": b"first", "three": b"second answer"}


def by_prompt(request: Any) -> list[int]:
    """Another output for every prompt and choice, so that a mix-up shows."""
    prompt = bytes(request.prompt_token_ids[1:]).decode()
    text = SCRIPTS.get(prompt, b"probed")
    return list(text + str(request.choice).encode())


async def test_b43_two_prompts_times_two_choices() -> None:
    model = ByteModel()
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 50}
    async with serve(FakeEngine(by_prompt), model) as server:
        plain = await server.complete(**body)
        usage_asked = body | {"stream_options": {"include_usage": True}}
        events = await server.events(COMPLETIONS, usage_asked)
    texts = ["first0", "first1", "second answer0", "second answer1"]
    merged = merge_completion(events)
    for answer in (plain, merged):
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == texts
        prompt_tokens = sum(len(model.tokenizer.encode(text)) for text in body["prompt"])
        output_tokens = sum(len(text) + 1 for text in texts)  # and the EOS each
        assert answer["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    reasons = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(reasons) == [0, 1, 2, 3]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b43_usage_is_the_last_chunk_only_when_asked_for(path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "n": 3}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hi"
    async with serve(FakeEngine(list(b"abcdef")), ByteModel()) as server:
        asked = await server.events(path, body | {"stream_options": {"include_usage": True}})
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            silent = await server.events(path, body | {"stream_options": options})
            assert all("usage" not in event for event in silent[:-1])
            assert all(event["choices"] for event in silent[:-1])
        _, plain = await server.post(path, body)
    *chunks, last, done = asked
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"] == plain["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_cached_tokens_count_once_per_prompt() -> None:
    class CachingEngine(FakeEngine):
        def _advance(self, request: Any) -> Any:
            from dataclasses import replace

            # Choices after the first share what that one has computed: not the cache's doing.
            found = 2 if request.choice == 0 else 3
            return replace(super()._advance(request), num_cached_tokens=found)

    async with serve(CachingEngine(list(b"ab")), ByteModel()) as server:
        body = {"prompt": ["one", "two"], "n": 3, "max_tokens": 2}
        answer = await server.complete(**body)
        events = await server.events(
            COMPLETIONS, body | {"stream_options": {"include_usage": True}}
        )
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert events[-2]["usage"] == answer["usage"]
