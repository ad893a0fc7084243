"""The real engine on tiny models: what fails fails alone, nothing leaks, nothing compiles late."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.runner import Runner
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS
from tests.support.tiny_engine import (
    AMPLE,
    Run,
    collect_stats,
    drive,
    random_prompts,
    request,
    take_in,
    tiny_engine,
    tiny_model,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = random_prompts(3, (5, 40), seed=3)
POISON = 250


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def greedy(prompts: list[list[int]], **changes: object) -> list:
    params = replace(GREEDY, **changes)  # type: ignore[arg-type]
    return [request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


def test_the_pool_is_updated_in_place(engine: Engine) -> None:
    assert all(engine.runner.forward_aliases_pool(bucket) for bucket in engine.bucket_table)


def test_b54_any_request_mix_compiles_nothing_after_warm_up(engine: Engine) -> None:
    params = [
        GREEDY,
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1, logprobs=20),
        SamplingParams(repetition_penalty=1.2, logit_bias={3: -100}, min_tokens=4, max_tokens=9),
        SamplingParams(temperature=0, stop_token_ids=[7], max_tokens=100),
    ]
    requests = [
        request(f"{i}-{length}", [i] * length, p)
        for i, p in enumerate(params)
        for length in (1, 3, 64, 65, 100)
        if length + (p.max_tokens or 0) <= 128
    ]
    stats = collect_stats(engine)
    drive(engine, requests)
    assert {s.late_compiles for s in stats} == {0}
    assert {s.bucket for s in stats} >= {"decode4", "mixed4+64"}


def test_b54_padding_does_not_change_logprobs() -> None:
    """One prompt through token buckets 64 to 317 and row buckets 1 and 4, alone and in company."""
    outputs = []
    for tokens in (64, 317):
        engine = tiny_engine(max_batch_tokens=tokens)
        for others in (0, 3):
            company = [request(f"other{i}", [i] * 30, GREEDY) for i in range(others)]
            run = drive(engine, [request("it", PROMPTS[0], GREEDY), *company])
            logprobs = [x for e in run.events if e.request_id == "it" for x in e.logprobs or ()]
            outputs.append((run.tokens["it"], [x.logprob for x in logprobs]))
    for tokens, logprobs in outputs[1:]:
        assert tokens == outputs[0][0]
        np.testing.assert_allclose(logprobs, outputs[0][1], atol=1e-5)


def poisoned() -> Engine:
    """An engine whose model answers NaN to whoever says POISON."""
    model = tiny_model()
    embed = model.params["embed"].at[POISON].set(np.nan)
    return tiny_engine(replace(model, params={**model.params, "embed": embed}))


def test_b34_a_nan_row_fails_alone_and_its_pages_are_cleaned() -> None:
    engine = poisoned()
    healthy = [[t for t in prompt if t != POISON] for prompt in PROMPTS]
    expected = drive(engine, greedy(healthy))
    bad = request("bad", [1, 2, POISON, 4, 5], GREEDY)
    got = drive(engine, [*greedy(healthy), bad])
    assert got.finish.pop("bad") == "error"
    assert "NaN" in got.errors["bad"]
    del got.tokens["bad"]
    assert got.tokens == expected.tokens
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(engine.runner.pool))
    assert drive(engine, greedy(healthy)).tokens == expected.tokens


class FlakyDispatch:
    """Makes the runner's next `failures` dispatches raise, after the pool was donated."""

    def __init__(self, runner: Runner, failures: int) -> None:
        self.dispatch, self.runner, self.failures = runner.dispatch, runner, failures

    def __call__(self, *args: object) -> object:
        if self.failures:
            self.failures -= 1
            self.dispatch(*args)  # type: ignore[arg-type]
            for leaf in jax.tree.leaves(self.runner.pool):
                leaf.delete()
            raise RuntimeError("device lost the step")
        return self.dispatch(*args)  # type: ignore[arg-type]


@pytest.fixture
def single_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count steps."""
    limits = replace(engine.scheduler.limits, max_burst=1)
    monkeypatch.setattr(engine.scheduler, "limits", limits)


def run_with_failures(engine: Engine, at_step: int, failures: int) -> Run:
    run = Run()
    for item in greedy(PROMPTS):
        engine.add(item)
    for step in range(200):
        if not engine.has_work:
            break
        if step == at_step:
            engine.runner.dispatch = FlakyDispatch(  # type: ignore[method-assign]
                engine.runner, failures
            )
        for event in engine.step():
            take_in(run, event)
        engine.check_integrity()
    del engine.runner.dispatch  # type: ignore[method-assign]
    assert engine.kv_manager.num_used == 0
    return run


@pytest.mark.usefixtures("single_steps")
def test_a_failed_step_is_recovered_and_changes_no_token(engine: Engine) -> None:
    expected = drive(engine, greedy(PROMPTS))
    for at_step in (0, 1, 5):
        got = run_with_failures(engine, at_step, failures=1)
        assert got.tokens == expected.tokens
        assert set(got.finish.values()) == {"length"}


@pytest.mark.usefixtures("single_steps")
def test_a_step_that_fails_twice_ends_its_requests_and_the_engine_lives(engine: Engine) -> None:
    expected = drive(engine, greedy(PROMPTS))
    got = run_with_failures(engine, 3, failures=2)
    failed = {name for name, why in got.finish.items() if why == "error"}
    assert failed
    assert all(got.tokens[name] == expected.tokens[name] for name in got.tokens.keys() - failed)
    assert drive(engine, greedy(PROMPTS)).tokens == expected.tokens


def test_an_engine_whose_steps_all_fail_says_it_is_dead() -> None:
    engine = tiny_engine()
    engine.runner.dispatch = FlakyDispatch(engine.runner, 99)  # type: ignore[method-assign]
    for i in range(3):
        engine.add(request(f"r{i}", [1, 2], GREEDY))
        engine.step()
    engine.add(request("last", [1, 2], GREEDY))
    with pytest.raises(EngineDeadError, match="in a row failed"):
        engine.step()


def test_abort_in_any_state_frees_pages_and_reports_once(engine: Engine) -> None:
    expected = drive(engine, greedy(PROMPTS[:1]))
    for at_step in range(4):
        requests = [request(f"x{i}", [9] * 100, GREEDY) for i in range(6)]
        for item in requests:
            engine.add(item)
        run = Run()
        for _ in range(at_step):
            for event in engine.step():
                take_in(run, event)
        for item in requests:
            engine.abort(item.request_id)
            engine.abort(item.request_id)
        engine.abort("unknown")
        for event in engine.step():
            take_in(run, event)
        assert set(run.finish.values()) == {"abort"}
        assert not engine.has_work
        assert engine.kv_manager.num_used == 0
    assert drive(engine, greedy(PROMPTS[:1])).tokens == expected.tokens


def test_eos_stop_ids_and_min_tokens_end_where_they_should(engine: Engine) -> None:
    plain = drive(engine, greedy(PROMPTS[:1])).tokens["0"]
    stop = plain[4]
    first = plain.index(stop)
    run = drive(engine, greedy(PROMPTS[:1], stop_token_ids=(stop,)))
    assert run.tokens["0"] == plain[: first + 1]
    assert run.finish["0"] == "stop"
    assert run.events[-1].stop_reason == stop
    later = drive(engine, greedy(PROMPTS[:1], stop_token_ids=(stop,), min_tokens=first + 2))
    assert stop not in later.tokens["0"][: first + 2]
    eos = SamplingParams(temperature=0, logit_bias={EOS: 100}, max_tokens=12, min_tokens=3)
    run = drive(engine, [request("e", PROMPTS[0], eos)])
    assert len(run.tokens["e"]) == 4
    assert run.tokens["e"][-1] == EOS
    assert run.finish["e"] == "stop"
    assert run.events[-1].stop_reason is None


@pytest.mark.usefixtures("single_steps")
def test_finish_drops_what_came_after_the_stop_string(engine: Engine) -> None:
    item = request("s", PROMPTS[0], GREEDY)
    engine.add(item)
    for _ in range(4):
        engine.step()
    stats = collect_stats(engine)
    engine.finish("s", 2)
    assert engine.has_work, "the statistics still say it runs"
    assert engine.step() == []
    assert (stats[-1].num_running, stats[-1].pages_used) == (0, 0)
    assert not engine.has_work
    assert len(item.output_token_ids) == 2
    assert engine.kv_manager.num_used == 0


def test_b14_lengths_at_the_limits_are_refused_or_served_never_cut(engine: Engine) -> None:
    limit = engine.max_model_len
    assert engine.check_admissible(limit - 5, None) == 5
    assert engine.check_admissible(limit - 1, 1) == 1
    for prompt, max_tokens in ((limit, None), (limit + 1, 1), (limit - 1, 2), (10, limit)):
        with pytest.raises(InvalidRequestError, match=str(limit)):
            engine.check_admissible(prompt, max_tokens)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    run = drive(engine, [request("long", [3] * (limit - 5), params)])
    assert len(run.tokens["long"]) == 5
    assert run.finish["long"] == "length"


def test_b01_a_prompt_beyond_the_pool_is_refused_at_once_and_blocks_nobody() -> None:
    engine = tiny_engine(num_pages=20)
    capacity = 19 * 4
    with pytest.raises(InvalidRequestError, match="pool"):
        engine.add(request("huge", [1] * (capacity + 1), GREEDY))
    run = drive(
        engine, [request("full", [1] * capacity, GREEDY), request("small", [1, 2, 3], GREEDY)]
    )
    assert run.finish == {"full": "length", "small": "length"}
    assert len(run.tokens["full"]) == 1
    assert len(run.tokens["small"]) == 12


def test_b01_a_pool_smaller_than_the_context_is_the_limit_not_a_silent_cut() -> None:
    engine = Engine(tiny_model(), EngineConfig(num_pages=12, page_size=4, max_batch_rows=3))
    assert engine.max_model_len == 11 * 4 + 1
    assert engine.check_admissible(20, None) == 25
    assert engine.check_admissible(44, 1) == 1
    for prompt, max_tokens in ((20, 26), (44, 2), (1, 45)):
        with pytest.raises(InvalidRequestError, match="KV pool"):
            engine.check_admissible(prompt, max_tokens)


def test_a_full_queue_and_a_used_id_are_refused(engine: Engine) -> None:
    small = Engine(tiny_model(), EngineConfig(max_queue=1, max_batch_rows=1, num_pages=AMPLE))
    small.add(request("a", [1], GREEDY))
    with pytest.raises(InvalidRequestError, match="in use"):
        small.add(request("a", [1], GREEDY))
    small.add(request("b", [1], GREEDY))
    with pytest.raises(QueueFullError, match="max_queue"):
        small.add(request("c", [1], GREEDY))


def test_kv_memory_too_small_for_a_page_says_how_much_is_needed() -> None:
    with pytest.raises(InvalidRequestError, match="give at least"):
        Engine(tiny_model(), EngineConfig(kv_memory=4096, page_size=64))


def test_every_batch_is_made_of_fresh_arrays(engine: Engine) -> None:
    """XLA:CPU reads numpy arguments in place, so an array of a dispatched step is never reused."""
    batches = [engine._empty_inputs(engine.bucket_table[0]) for _ in range(2)]
    first, second = (list(jax.tree.leaves(batch)) for batch in batches)
    assert all(isinstance(leaf, np.ndarray) for leaf in first)
    assert not any(np.shares_memory(a, b) for a in first for b in second)
