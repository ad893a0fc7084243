"""The audit of steps with drafts: it finds what is wrong, and nobody can tell that it was there."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.step_batch import StepOutput
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_shape import engine_shape
from jaxserve.sampling import verify
from jaxserve.sampling_params import SamplingParams
from tests.engine import test_windowed_pages
from tests.support.speculating import ask, make, model, prompts, speculation
from tests.support.tiny_engine import (
    Run,
    collect_stats,
    drive,
    request,
    single_steps,
    take_in,
    tiny_engine,
)

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
EVERYTHING = replace(
    GREEDY, temperature=0.3, top_p=0.95, seed=-4, logit_bias={65: 2.0}, min_tokens=9,
    stop_token_ids=list(range(0, 256, 6)), ignore_eos=False, repetition_penalty=1.05,
    presence_penalty=0.1, frequency_penalty=0.1, logprobs=2,
)  # fmt: skip
SOME = prompts()[1::6]
SMALL: dict[str, Any] = {"max_batch_rows": 2}


def audited_engine(share: float = 1.0, **settings: Any) -> Engine:
    fields = {**SMALL, "speculative_audit": share, **settings}
    return single_steps(make(speculation("lookahead", 3), **fields))


def pages_of(engine: Engine) -> tuple[Any, ...]:
    """Which pages are free, kept and held, in the order of their next use."""
    allocator = engine.kv_manager._allocator
    running = [request.pages for request in engine.scheduler.running]
    return list(allocator._free), list(allocator._idle), list(allocator._ref_counts), running


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_b26_an_audit_finds_nothing_and_changes_nothing(params: SamplingParams) -> None:
    """Tokens, logprobs, events and pages, step by step."""
    engines = single_steps(make(speculation("lookahead", 3), **SMALL)), audited_engine()
    for engine in engines:
        for item in ask(params, SOME):
            engine.add(item)
    while engines[0].has_work:
        events = [engine.step() for engine in engines]
        assert events[0] == events[1]
        assert pages_of(engines[0]) == pages_of(engines[1])
        engines[1].check_integrity()
    assert not engines[1].has_work
    stats = [engine.speculation for engine in engines]
    assert stats[1].num_audited > 0
    assert stats[1].num_audit_mismatches == stats[0].num_audited == 0
    assert stats[1].num_accepted == stats[0].num_accepted
    assert engines[1].runner.late_compiles == 0


def test_it_writes_nothing_but_its_own_pages_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = audited_engine()
    auditor = engine._loop._speculator._auditor
    num_pages, slot = engine.shape.num_pages, auditor._slot
    written: list[bool] = []

    def watched(*args: Any) -> tuple[int, bool]:
        before = jax.tree.map(np.asarray, (engine.runner.pool, engine.runner._state))
        result = type(auditor).audit(auditor, *args)
        after = jax.tree.map(np.asarray, (engine.runner.pool, engine.runner._state))
        axis = engine.runner.pool.page_axis
        for old, new in zip(jax.tree.leaves(before[0]), jax.tree.leaves(after[0]), strict=True):
            old, new = np.moveaxis(old, axis, 0), np.moveaxis(new, axis, 0)
            np.testing.assert_array_equal(old[:num_pages], new[:num_pages])
            written.append(bool((old[num_pages:] != new[num_pages:]).any()))
        for old, new in zip(jax.tree.leaves(before[1]), jax.tree.leaves(after[1]), strict=True):
            np.testing.assert_array_equal(old[:slot], new[:slot])
        return result

    monkeypatch.setattr(auditor, "audit", watched)
    drive(engine, ask(replace(EVERYTHING, logprobs=None), SOME[:6]))
    assert any(written)
    assert engine.shape.pool_pages == num_pages + 3  # a burst of 8 in pages of 4


def all_drafts_hold(drafts: jax.Array, *args: Any, **settings: Any) -> tuple[StepOutput, Any]:
    """A rule that is wrong."""
    output, state = verify(drafts, *args, **settings)
    exists = drafts >= 0
    tokens = jnp.asarray(output.tokens)
    tokens = tokens.at[:, :-1].set(jnp.where(exists, drafts, tokens[:, :-1]))
    return replace(output, tokens=tokens, num_accepted=exists.sum(axis=1, dtype=jnp.int32)), state


def test_b26_a_planted_error_is_counted_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxserve.engine.programs.verify", all_drafts_hold)
    engine = tiny_engine(
        model(), max_batch_rows=1, max_batch_tokens=16, speculative_audit=1.0,
        speculative=speculation("lookahead", 3),
    )  # fmt: skip
    told = collect_stats(engine)
    run = drive(engine, [request("wrong", SOME[0], GREEDY)])
    stats = engine.speculation
    assert stats.num_accepted == stats.num_drafted > 0
    assert 0 < stats.num_audit_mismatches <= stats.num_drafts
    assert stats.num_audit_mismatches <= stats.num_audited
    assert sum(one.speculation.num_audit_mismatches for one in told) == stats.num_audit_mismatches
    assert sum(one.speculation.num_audited for one in told) == stats.num_audited
    lines = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    assert len(lines) == stats.num_audit_mismatches
    place = int(lines[0].split("token ")[1].split()[0])
    said = run.tokens["wrong"][place - len(SOME[0])]
    assert "request wrong" in lines[0]
    assert f"said {said}, plain decoding draws" in lines[0]


@pytest.mark.parametrize(
    ("windowed", "settings"),
    [(True, {}), (False, {"page_size": 1, "kv_cache_dtype": "int8"})],
    ids=["windows", "int8"],
)
def test_windows_and_quantised_pages_and_more_drafts_than_a_burst(
    windowed: bool, settings: dict[str, Any]
) -> None:
    engine = tiny_engine(
        test_windowed_pages.model() if windowed else model(),
        max_batch_rows=1, max_batch_tokens=16, num_pages=400, speculative_audit=1.0,
        speculative=speculation("lookahead", 8), **settings,
    )  # fmt: skip
    loops = [tuple([5, 6, 7] * 8), tuple([9] * 20)]
    drive(engine, ask(replace(GREEDY, max_tokens=60), loops), together=False)
    stats = engine.speculation
    assert stats.num_audited > 0
    assert stats.num_audit_mismatches == 0
    assert stats.num_accepted_per_position[-1] > 0  # runs of 9 tokens, of which 8 are compared


def test_the_share_is_of_the_steps_in_which_drafts_held() -> None:
    counts = []
    for share in (1.0, 0.3, 1e-9):
        engine = audited_engine(share)
        drive(engine, ask(GREEDY, SOME), together=False)
        counts.append(engine.speculation.num_audited)
    assert counts[0] > counts[1] > counts[2] == 0
    assert 0.1 < counts[1] / counts[0] < 0.6


def steps_until_drafts_are_in_flight(engine: Engine, run: Run) -> None:
    stats = collect_stats(engine)
    while not stats or not stats[-1].bucket.startswith("verify"):
        for event in engine.step():
            take_in(run, event)


def test_who_has_left_is_not_audited() -> None:
    engine, run = audited_engine(), Run()
    auditor = engine._loop._speculator._auditor
    asked: list[int] = []

    def counted(item: Any, *args: Any) -> Iterable[int]:
        asked.append(item.start)
        return type(auditor)._decode(auditor, item, *args)

    auditor._decode = counted
    for end in (engine.abort, engine.scheduler.preempt):
        engine.add(request("r", [5, 6, 7] * 6, replace(GREEDY, max_tokens=60)))
        steps_until_drafts_are_in_flight(engine, run)
        before = len(asked)
        end("r")
        engine.step()
        assert len(asked) == before
        engine.check_integrity()
    while engine.has_work:
        engine.step()
    assert asked


def test_an_audit_that_fails_is_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drive(audited_engine(), ask(GREEDY, SOME[:2]))
    engine = audited_engine()
    failures: list[int] = []

    def broken(*args: Any) -> tuple[int, bool]:
        if failures:
            return 0, False
        failures.append(1)
        raise RuntimeError("device lost the step")

    monkeypatch.setattr(engine._loop._speculator._auditor, "audit", broken)
    assert drive(engine, ask(GREEDY, SOME[:2])).tokens == expected.tokens
    assert failures


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_its_pages_are_paid_from_the_memory_for_pages(page_size: int) -> None:
    kv_spec = model().model.kv_spec(model().config)
    settings: dict[str, Any] = {"page_size": page_size, "kv_memory": 1 << 17}
    plain, audited = [
        engine_shape(model(), EngineConfig(**settings, **more), kv_spec, None)
        for more in ({}, {"speculative": speculation("ngram"), "speculative_audit": 0.01})
    ]
    assert plain.audit_pages == 0
    assert audited.pool_pages == plain.pool_pages == plain.num_pages
    # A burst of 8 tokens that begins with the last place of a page.
    assert audited.audit_pages == len({place // page_size for place in range(-1, 7)})
