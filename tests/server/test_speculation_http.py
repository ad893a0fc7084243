"""Speculation as clients and operators see it: the field, the answers, the counters."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.server.metrics import ServerMetrics
from tests.server.test_metrics import step, value
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.merge_chunks import merge_completion, without_identity
from tests.support.running_server import RunningServer, serve
from tests.support.speculating import MAX_LEN, ROWS, model, speculation
from tests.support.tiny_engine import AMPLE, SMALL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DRAFTS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, n 3": {"seed": 7, "n": 3, "temperature": 0.7},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "logit_bias": {"65": 3}},
    "ids": {"temperature": 0, "return_token_ids": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RunningServer]:
    loaded = replace(model(), max_model_len=MAX_LEN)
    fields: dict[str, Any] = {
        **SMALL,
        "num_pages": AMPLE,
        "max_batch_rows": ROWS,
        "max_batch_tokens": 16,
    }
    config = EngineConfig(**fields, speculative=speculation("lookahead", 3))
    async with serve(Engine(loaded, config), loaded) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BODIES)
async def test_answers_are_the_same_with_drafts_and_without(
    server: RunningServer, name: str
) -> None:
    body = {"prompt": "abcabcabcabc", "max_tokens": 24, "ignore_eos": True} | BODIES[name]
    before = await server.metric(DRAFTED)
    none = body | {"speculative": {"num_speculative_tokens": 0}, "cache_salt": f"{name} none"}
    plain = await server.complete(**none)
    await server.wait_idle()
    assert await server.metric(DRAFTED) == before
    drafted = await server.complete(**body, cache_salt=f"{name} all")
    assert without_identity(drafted) == without_identity(plain)
    merged = merge_completion(
        await server.events(
            COMPLETIONS,
            body | {"stream_options": {"include_usage": True}, "cache_salt": f"{name} stream"},
        )
    )
    assert without_identity(merged) == without_identity(plain)
    await server.wait_idle()
    assert await server.metric(DRAFTED) > before
    assert await server.metric("late_compiles_total") == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_inside_a_run_of_drafts(server: RunningServer) -> None:
    body = {"prompt": "abcabcabcabc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = (await server.complete(**body))["choices"][0]["text"]
    cases = 0
    for start in range(4, len(text) - 2, 3):
        stop = text[start : start + 2]
        if "\ufffd" in stop:  # half a character: no stop string
            continue
        choice = (await server.complete(**body, stop=stop))["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        cases += 1
    assert cases > 0
    await server.wait_idle()
    assert await server.metric(ACCEPTED) > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_counters_fit_together(server: RunningServer) -> None:
    await server.complete(prompt="xyxyxyxyxyxy", max_tokens=30, temperature=0, ignore_eos=True)
    await server.wait_idle()
    drafts, drafted, accepted = [await server.metric(name) for name in (DRAFTS, DRAFTED, ACCEPTED)]
    assert 0 < accepted < drafted <= 3 * drafts
    rows = await server.metric("spec_decode_num_rows_total")
    assert await server.metric("spec_decode_num_emitted_tokens_total") == rows + accepted
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    counts = [await server.metric(per_position, position=str(i)) for i in range(3)]
    assert sum(counts) == accepted
    assert counts == sorted(counts, reverse=True)


BAD = [
    ("ngram", "num_speculative_tokens"),
    ([], "an object"),
    ({"method": "ngram"}, "method"),
    ({"num_speculative_tokens": -1}, "-1"),
    ({"num_speculative_tokens": 10**9}, "from 0 to"),
    ({"num_speculative_tokens": True}, "True"),
    ({"num_speculative_tokens": 1.5}, "1.5"),
]


async def test_a_wrong_field_is_a_400_that_names_it() -> None:
    engine = FakeEngine(list(b"fine"))
    async with serve(engine, ByteModel()) as server:
        for path, rest in (
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ):
            for wrong, shown in BAD:
                status, answer = await server.post(path, rest | {"speculative": wrong})
                assert status == 400, (wrong, answer)
                assert answer["error"]["param"] == "speculative"
                assert shown in answer["error"]["message"]
            for right in (None, {}, {"num_speculative_tokens": None}):
                status, answer = await server.post(path, rest | {"speculative": right})
                assert status == 200, (right, answer)


def test_counters_add_up_over_steps() -> None:
    metrics = ServerMetrics("m")
    metrics.on_step(step())
    assert value(metrics, DRAFTS) == 0
    for _ in range(2):
        metrics.on_step(step(speculation=SpeculationStats(2, 7, 3, 6, 3, [2, 1, 0], 5, 1)))
    assert [value(metrics, name) for name in (DRAFTS, DRAFTED, ACCEPTED)] == [4, 14, 6]
    assert value(metrics, "spec_decode_num_emitted_tokens_total") == 12
    assert value(metrics, "spec_decode_num_rows_total") == 6
    assert value(metrics, "spec_decode_audited_tokens_total") == 10
    assert value(metrics, "spec_decode_audit_mismatches_total") == 2
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_position, position=str(i)) for i in range(2)] == [4, 2]
