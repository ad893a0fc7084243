"""Several decode steps in one dispatch: when they run, and that no output tells."""

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.engine.bursts import BURST_SECONDS, MAX_BURST
from jaxserve.engine.engine import Engine
from jaxserve.engine.step_times import StepTimes
from jaxserve.sampling_params import SamplingParams
from tests.support.scheduler_harness import (
    LIMITS,
    Harness,
    expected_output,
    make_request,
)
from tests.support.tiny_engine import drive, request, tiny_engine

PROMPTS = [[1, 2, 3], [7, 5, 3, 1, 9, 11, 2], [4] * 9]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=21, ignore_eos=True, seed=5)
PENALISED = replace(SAMPLED, presence_penalty=0.7, repetition_penalty=1.3, logit_bias={3: -4.0})
HELD = SamplingParams(temperature=0.0, min_tokens=6, max_tokens=21, stop_token_ids=[1, 2, 3, 4])
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def burst_harness(seconds: float = 0.001, **options: Any) -> Harness:
    times = StepTimes()
    for rows in (1, 2, 4):
        times.observe(rows, 0, seconds)
    limits = replace(LIMITS, max_burst=8)
    return Harness(limits, step_times=times, **options)


def steps_of(harness: Harness) -> list[int]:
    steps = []
    while harness.scheduler.has_work or harness.in_flight:
        plan = harness.step()
        if not plan.is_empty:
            steps.append(plan.steps)
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lone_request_runs_in_bursts_up_to_its_last_token(depth: int) -> None:
    harness = burst_harness(depth=depth)
    one = make_request("one", 5, 22)
    harness.add(one)
    assert steps_of(harness) == [1, 8, 8, 5]
    assert (one.output_token_ids, "length") == expected_output(one, harness.max_total)


def test_nobody_waits_for_a_burst_that_is_not_running_yet() -> None:
    harness = burst_harness()
    harness.add(make_request("early", 5, 40))
    assert [harness.step().steps for _ in range(2)] == [1, 8]
    harness.add(make_request("late", 5, 40))
    plan = harness.step()
    assert (plan.steps, len(plan.prefill)) == (1, 1)
    harness.add(*(make_request(f"more{i}", 5, 40) for i in range(3)))  # one finds no row
    assert [harness.step().steps for _ in range(3)] == [1, 1, 1]


def test_a_burst_is_as_long_as_its_time_allows() -> None:
    for seconds, steps in ((BURST_SECONDS / 3.5, 3), (BURST_SECONDS * 2, 1)):
        harness = burst_harness(seconds)
        harness.add(make_request("one", 5, 40))
        harness.step()
        assert harness.step().steps == steps


def test_a_burst_preempts_nobody() -> None:
    """Where pages are short, single steps go on until even those find none."""
    harness = burst_harness(num_pages=1 + 12, page_size=4)
    requests = [make_request(name, 9, 28) for name in "ab"]
    harness.add(*requests)
    plans = []
    while harness.scheduler.has_work:
        plans.append(harness.step())
    assert any(plan.preempted for plan in plans)
    assert not any(plan.preempted and plan.steps > 1 for plan in plans)
    assert {plan.steps > 1 for plan in plans if len(plan.decode) == 2} == {True, False}
    for one in requests:
        assert (one.output_token_ids, "length") == expected_output(one, harness.max_total)


def bursts_of(engine: Engine) -> list[float]:
    """Tokens a decode step ran, filled while the engine runs."""
    seen: list[float] = []
    engine.observe(lambda stats: seen.append(stats.step_tokens))
    return seen


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("params", [SAMPLED, PENALISED, HELD, LOGPROBS])
def test_outputs_and_logprobs_are_those_of_single_steps(
    params: SamplingParams, asynchronous: bool
) -> None:
    runs = []
    for most in (1, MAX_BURST):
        engine = tiny_engine(asynchronous=asynchronous)
        engine.scheduler.limits = replace(engine.scheduler.limits, max_burst=most)
        seen = bursts_of(engine)
        run = drive(engine, [request(f"r{i}", p, params) for i, p in enumerate(PROMPTS)])
        logprobs = {
            name: [x for e in run.events if e.request_id == name for x in e.logprobs or ()]
            for name in run.tokens
        }
        runs.append((run.tokens, run.finish, logprobs))
        lasts = [tokens for tokens in seen if tokens > len(PROMPTS)]
        assert (len(lasts) > 1) == (most > 1), "prompts are one such step"
        assert engine.runner.late_compiles == 0
    assert runs[0] == runs[1]


def test_an_abort_is_heard_after_the_burst_that_runs() -> None:
    engine = tiny_engine()
    engine.add(request("it", PROMPTS[0], LONG))
    events = []
    while sum(len(event.token_ids) for event in events) < 9:
        events += engine.step()
    engine.abort("it")
    ends = [event for event in engine.step() if event.finish_reason]
    assert [event.finish_reason for event in ends] == ["abort"]
    while engine.has_work:
        assert not engine.step()
    assert engine.kv_manager.num_used == 0
    engine.check_integrity()
