"""Logprobs of a prompt that was preempted, lost, aborted or broken on the way: all, or nothing."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.support.prompt_scores import (
    ASKS,
    PROMPTS,
    asking,
    check_shape,
    engine,
    found,
    new_engine,
    numbers,
    plain,
)
from tests.support.tiny_engine import AMPLE, Run, drive, request, tiny_engine, tiny_model


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_preempted_inside_the_prompt(steps: int, asynchronous: bool, prefix_cache: bool) -> None:
    made = new_engine(max_chunk=7, prefix_cache=prefix_cache, asynchronous=asynchronous)
    requests = asking()
    for item in requests:
        made.add(item)
    run = Run()
    for count in itertools.count():
        if not made.has_work:
            break
        if count == steps:
            for item in requests:
                made.scheduler.preempt(item.request_id)
        run.events += made.step()
        made.check_integrity()
    assert sum(item.num_preemptions for item in requests) >= 2
    got = found(run)
    assert [numbers(got[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")


def test_what_is_known_when_preempted_is_not_computed_again() -> None:
    made = new_engine(max_chunk=8, asynchronous=False)
    item = asking([PROMPTS[0][:1] * 40])[0]
    made.add(item)
    made.step()
    made.step()
    assert item.num_prompt_logprobs == 16
    made.scheduler.preempt("0")
    assert item.max_shared == 16
    made.step()
    assert item.num_computed == 24
    run = Run()
    while made.has_work:
        run.events += made.step()
    check_shape(item.prompt_token_ids, found(run)["0"], 2)


@pytest.mark.parametrize("how", ["preempt_all", "tight"])
def test_a_lost_pool_and_a_tight_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = AMPLE if how == "preempt_all" else 34
    made = new_engine(max_chunk=7, pages=pages)
    params = replace(ASKS, max_tokens=40)
    requests = [request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    if how == "preempt_all":
        dispatch, calls = made.runner.dispatch, itertools.count()

        def failing(*args: object) -> object:
            if next(calls) == 3:
                raise RuntimeError("the device is gone")
            return dispatch(*args)

        monkeypatch.setattr(made.runner, "dispatch", failing)
    run = drive(made, requests)
    assert run.preemptions > 0
    got = found(run)
    assert [numbers(got[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")


def test_b10_aborted_inside_the_prompt_sends_nothing() -> None:
    made = engine("llama", "cpu", 7)
    one, other = asking([PROMPTS[0] * 2, PROMPTS[1]])
    made.add(one)
    made.add(other)
    events = [*made.step(), *made.step()]
    assert one.num_prompt_logprobs > 0
    made.abort("0")
    run = Run()
    while made.has_work:
        run.events += made.step()
    run.events[:0] = events
    assert [e for e in run.events if e.request_id == "0"][-1].finish_reason == "abort"
    assert list(found(run)) == ["1"]
    assert numbers(found(run)["1"]) == plain("llama", "cpu")[1]
    assert made.kv_manager.num_used == 0


def test_a_prompt_that_makes_nan_fails_alone() -> None:
    loaded = tiny_model()
    params = {**loaded.params, "embed": loaded.params["embed"].at[200].set(np.nan)}
    made = tiny_engine(replace(loaded, params=params), max_chunk=7)
    bad, good = asking([[*range(10, 40), 200, 50, 60], PROMPTS[1]])
    run = drive(made, [bad, good])
    assert run.finish == {"0": "error", "1": "length"}
    assert list(found(run)) == ["1"]
