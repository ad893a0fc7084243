"""The same cases through a real engine: a tiny random model, its pages and its compiled steps."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from tests.support.byte_model import BOS, VOCAB_SIZE
from tests.support.merge_chunks import merge_chat, merge_completion, without_identity
from tests.support.running_server import PROBE, RunningServer, serve
from tests.support.tiny_engine import AMPLE, SMALL, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX = 128
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningServer]:
    """One engine for the module: its programs are compiled once."""
    from dataclasses import replace

    model = replace(tiny_model(), max_model_len=MAX)
    engine = Engine(model, EngineConfig(**SMALL, num_pages=AMPLE))
    async with serve(engine, model) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def server(shared: RunningServer) -> AsyncIterator[RunningServer]:
    """Every case ends with: alive, pages free, no unexpected 5xx, nothing compiled."""
    before = await shared.complete(**PROBE)
    await shared.wait_idle()
    shared.statuses.clear()
    yield shared
    await shared.wait_idle()
    assert (await shared.complete(**PROBE))["choices"] == before["choices"]
    await shared.wait_idle()
    assert not [status for status in shared.statuses if status >= 500]
    assert await shared.metric("late_compiles_total") == 0


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "seeded, n 3": {"seed": 7, "n": 3},
    "logprobs": {"seed": 1, "logprobs": 4},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "filters": {"seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "ids": {"seed": 5, "return_token_ids": True},
    "echo": {"seed": 6, "n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_stream_equals_plain(server: RunningServer, variant: str) -> None:
    body = {"prompt": "Once upon", "max_tokens": 20} | VARIANTS[variant]
    # Salts of their own: what the second found in the cache could differ in a last bit.
    asked = body | {"stream_options": {"include_usage": True}, "cache_salt": f"{variant}, stream"}
    merged = merge_completion(await server.events(COMPLETIONS, asked))
    plain = await server.complete(**body, cache_salt=f"{variant}, plain")
    assert without_identity(merged) == without_identity(plain)


async def test_b10_a_text_is_scored_as_it_was_drawn(server: RunningServer) -> None:
    """What a prompt alone says of its tokens is what was said when they were drawn."""
    drawn = await server.complete(
        prompt="Once upon", max_tokens=12, temperature=0, ignore_eos=True, logprobs=2,
        return_token_ids=True,
    )  # fmt: skip
    choice = drawn["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    for _ in range(2):  # the second time all of it is in the prefix cache
        scored = await server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=2)
        fields = scored["choices"][0]["logprobs"]
        assert {len(values) for values in fields.values()} == {len(ids)}
        assert fields["token_logprobs"][0] is fields["top_logprobs"][0] is None
        own = zip(fields["token_logprobs"][1:], fields["top_logprobs"][1:], strict=True)
        assert all(logprob in top.values() for logprob, top in own)
        got = fields["token_logprobs"][len(choice["prompt_token_ids"]) :]
        assert got == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_b10_an_abort_inside_a_prompt_leaves_nothing_behind(server: RunningServer) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 20, "echo": True, "logprobs": 5, "timeout": 1e-6}
    status, answer = await server.post(COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (408, "generation_timeout")


async def test_chat_stream_equals_plain(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "seed": 4, "n": 2, "logprobs": True}
    body |= {"top_logprobs": 3, "cache_salt": "chat, plain"}
    asked = body | {"stream_options": {"include_usage": True}, "cache_salt": "chat, stream"}
    merged = merge_chat(await server.events(CHAT, asked))
    assert without_identity(merged) == without_identity(await server.chat(**body))


async def test_prompts_of_one_call_answer_as_alone(server: RunningServer) -> None:
    prompts = ["one", "two two", "a third and longer prompt"]
    together = await server.complete(prompt=prompts, max_tokens=10, temperature=0)
    alone = [await server.complete(prompt=p, max_tokens=10, temperature=0) for p in prompts]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [answer["choices"][0]["text"] for answer in alone]


async def hang_up(server: RunningServer, body: dict[str, Any], seconds: float) -> None:
    data = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + data)
    await asyncio.sleep(seconds)
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_b02_fifty_hang_ups_free_every_page(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    await asyncio.gather(*(hang_up(server, body, 0.02 + 0.004 * i) for i in range(50)))
    await server.wait_idle()
    assert await server.metric("num_requests_running") == 0
    assert await server.metric("num_requests_waiting") == 0
    assert await server.metric("kv_cache_usage_perc") == 0
    drawn = await server.metric("generation_tokens_total")
    await asyncio.sleep(0.1)
    assert await server.metric("generation_tokens_total") == drawn


async def test_b04_one_bos_on_every_path(server: RunningServer) -> None:
    chat = await server.chat(messages=HELLO, max_tokens=1, return_token_ids=True)
    assert chat["prompt_token_ids"].count(BOS) == 1
    raw = await server.complete(prompt="hi", max_tokens=1, return_token_ids=True)
    assert raw["choices"][0]["prompt_token_ids"] == [BOS, *b"hi"]


async def test_b06_bad_prompts_leave_the_engine_alive(server: RunningServer) -> None:
    bad: list[Any] = [[], [[]], [-1], [VOCAB_SIZE], [5279552648203111001], [1, True]]
    bad.append([[1], [VOCAB_SIZE + 7]])
    for prompt in bad:
        status, answer = await server.post(COMPLETIONS, {"prompt": prompt})
        assert status == 400, prompt
        assert answer["error"]["param"] == "prompt"
    for prompt in ("", [""]):
        assert (await server.complete(prompt=prompt, max_tokens=1))["usage"]["prompt_tokens"] == 1


async def test_b14_lengths_up_to_the_context(server: RunningServer) -> None:
    table = [(MAX - 1, None, 1), (MAX - 5, None, 5), (10, MAX - 10, MAX - 10)]
    for num_prompt, max_tokens, expected in table:
        body = {"prompt": [65] * num_prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await server.complete(**body)
        assert answer["usage"]["prompt_tokens"] == num_prompt
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"
    for num_prompt, max_tokens in ((MAX, None), (MAX + 1, None), (10, MAX)):
        body = {"prompt": [65] * num_prompt, "max_tokens": max_tokens}
        status, answer = await server.post(COMPLETIONS, body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_b32_b38_edges_are_served_or_refused(server: RunningServer) -> None:
    for good in ({"top_k": VOCAB_SIZE + 5}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}):
        await server.complete(prompt="x", max_tokens=3, seed=1, **good)
    for name, value in (("top_k", -2), ("top_p", 1.01), ("min_p", 1.1), ("stop", [""])):
        status, answer = await server.post(COMPLETIONS, {"prompt": "x", name: value})
        assert (status, answer["error"]["param"]) == (400, name)


async def test_b34_masked_alternatives_stay_strict_json(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "logprobs": 5, "top_k": 1}
    body["logit_bias"] = {str(token): -100 for token in range(100)}
    answer = await server.complete(**body)
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(-9999.0 <= value <= 0.0 for value in top.values())


async def test_b43_usage_counts_each_prompt_once(server: RunningServer) -> None:
    body = {"prompt": ["abc", "defgh"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    before = await server.metric("prompt_tokens_total")
    usage = (await server.complete(**body))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4 + 6, 4 * 3)
    assert await server.metric("prompt_tokens_total") == before + 4 + 6


async def test_many_at_once_all_finish(server: RunningServer) -> None:
    body = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True, "temperature": 0}
    answers = await asyncio.gather(*(server.complete(**body) for _ in range(40)))
    assert all(answer["usage"]["completion_tokens"] == 10 for answer in answers)
