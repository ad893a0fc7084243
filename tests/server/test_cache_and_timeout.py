"""A real engine behind the server: cached tokens in usage and metrics, salts, time limits."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from tests.support.running_server import RunningServer, serve
from tests.support.tiny_engine import AMPLE, SMALL, tiny_model

MAX = 128
PAGE = SMALL["page_size"]
PROMPT = "the same beginning of many prompts"  # with BOS 35 tokens: 8 pages of 4, and 3


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RunningServer]:
    model = replace(tiny_model(), max_model_len=MAX)
    engine = Engine(model, EngineConfig(**{**SMALL, "num_pages": AMPLE}))
    async with serve(engine, model) as server:
        yield server


async def ask(server: RunningServer, **fields: object) -> tuple[int, str]:
    """Cached tokens and text of a greedy answer."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields
    answer = await server.complete(**body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["choices"][0]["text"]


async def test_b12_cached_tokens_are_told_and_salts_keep_apart(server: RunningServer) -> None:
    hits = await server.metric("prefix_cache_hits_total")
    first, text = await ask(server)
    assert first == 0
    again, same = await ask(server)
    assert 8 * PAGE <= again <= 34
    assert same == text
    assert await ask(server, cache_salt="mine") == (0, text)
    assert await ask(server, cache_salt="yours") == (0, text)
    assert (await ask(server, cache_salt="mine"))[0] == again
    assert await server.metric("prefix_cache_hits_total") == hits + 2 * again
    assert await server.metric("prefix_cache_queries_total") >= 5 * 34


async def test_cached_tokens_do_not_count_what_choices_share(server: RunningServer) -> None:
    assert await ask(server, n=4) == (0, (await ask(server))[1])


async def test_timeouts_end_running_and_waiting_requests(server: RunningServer) -> None:
    body = {"prompt": "x", "n": 8, "max_tokens": 120, "ignore_eos": True, "timeout": 0.001}
    status, answer = await server.post("/v1/completions", body)
    assert status in (200, 408)
    if status == 200:
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"timeout"}
    await server.wait_idle()
    status, answer = await server.post("/v1/completions", body | {"timeout": 60})
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
