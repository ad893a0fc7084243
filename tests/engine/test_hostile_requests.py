"""Requests that come, end, share and are sent back at the worst moments: nobody else notices."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, Status
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    AMPLE,
    Run,
    collect_stats,
    drive,
    random_prompts,
    request,
    single_steps,
    take_in,
    tiny_engine,
    tiny_model,
)

MODEL = tiny_model()
PROGRAMS = SharedPrograms()
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PENALTIES = SamplingParams(
    temperature=0.9, seed=8, frequency_penalty=0.7, presence_penalty=0.2, max_tokens=10,
    ignore_eos=True,
)  # fmt: skip
PROMPTS = random_prompts(3, (20, 40), seed=9)
PAGE = 4


def make(**settings: Any) -> Engine:
    return single_steps(tiny_engine(MODEL, loader=PROGRAMS, **settings))


@pytest.fixture(scope="module")
def plain() -> Engine:
    """What everybody would say alone."""
    return make(prefix_cache=False, asynchronous=False)


def said_alone(plain: Engine, prompt: list[int], params: SamplingParams, choice: int = 0) -> list:
    run = drive(plain, [request("alone", prompt, params, choice=choice)])
    return run.tokens["alone"]


def step_until(engine: Engine, run: Run, item: Request, num_output: int) -> None:
    while len(item.output_token_ids) < num_output:
        assert engine.has_work, "it has ended before"
        step(engine, run)


def step(engine: Engine, run: Run) -> None:
    for event in engine.step():
        take_in(run, event)
    engine.check_integrity()


def finish(engine: Engine, run: Run) -> Run:
    while engine.has_work:
        step(engine, run)
    assert engine.kv_manager.num_used == 0
    return run


@pytest.mark.parametrize("num_output", [0, 1, 5])
@pytest.mark.parametrize("params", [GREEDY, PENALTIES], ids=["greedy", "penalties"])
def test_an_id_used_again_at_once_is_another_request(
    plain: Engine, num_output: int, params: SamplingParams
) -> None:
    """The first one's last draw is in flight when the second one of its name begins."""
    engine, run = make(), Run()
    for prompt in PROMPTS:
        first = request("same", prompt, params)
        engine.add(first)
        step(engine, run)
        step_until(engine, run, first, num_output)
        engine.abort("same")
        run = Run()
        engine.add(request("same", PROMPTS[0], params))
        (aborted,) = [event for event in engine.step() if event.finish_reason]
        assert aborted.finish_reason == "abort"
        finish(engine, run)
        assert run.tokens["same"] == said_alone(plain, PROMPTS[0], params)
        assert run.finish == {"same": "length"}


def test_a_stop_string_found_while_later_tokens_are_in_flight(plain: Engine) -> None:
    engine, run = make(), Run()
    items = [request(str(i), prompt, PENALTIES) for i, prompt in enumerate(PROMPTS)]
    for item in items:
        engine.add(item)
    step_until(engine, run, items[2], 6)
    engine.finish("2", 3)
    engine.finish("2", 3)  # known no more
    before = list(run.tokens["2"])
    finish(engine, run)
    assert run.tokens["2"] == before, "something was told after the end"
    assert len(items[2].output_token_ids) == 3
    assert "2" not in run.finish
    for i in (0, 1):
        assert run.tokens[str(i)] == said_alone(plain, PROMPTS[i], PENALTIES)


def test_a_deadline_that_passes_while_the_last_token_is_in_flight(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, run = make(), Run()
    late, other = (request(name, PROMPTS[i], GREEDY) for i, name in enumerate(("late", "other")))
    late.deadline = time.monotonic() + 3600
    engine.add(late)
    engine.add(other)
    step_until(engine, run, late, GREEDY.max_tokens - 1)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
    monkeypatch.setattr("jaxserve.engine.step_report.time", later)
    finish(engine, run)
    assert run.finish == {"late": "timeout", "other": "length"}
    assert run.tokens["late"] == said_alone(plain, PROMPTS[0], GREEDY)[:-1]
    assert run.tokens["other"] == said_alone(plain, PROMPTS[1], GREEDY)


@pytest.mark.parametrize("params", [GREEDY, PENALTIES], ids=["greedy", "penalties"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_at_every_step_in_turn(
    plain: Engine, params: SamplingParams, prefix_cache: bool
) -> None:
    engine, run = make(prefix_cache=prefix_cache), Run()
    for i, prompt in enumerate(PROMPTS):
        engine.add(request(str(i), prompt, params))
    turns = 0
    while engine.has_work:
        if turns % 3 == 2:  # twice in a row would undo all progress without the cache
            engine.scheduler.preempt(str(turns // 3 % 3))
        turns += 1
        assert turns < 500
        step(engine, run)
    for i, prompt in enumerate(PROMPTS):
        assert run.tokens[str(i)] == said_alone(plain, prompt, params)


def test_a_fork_of_a_preempted_request(plain: Engine) -> None:
    engine, run = make(), Run()
    parent = request("parent", PROMPTS[0], PENALTIES)
    engine.add(parent)
    step_until(engine, run, parent, 4)
    engine.scheduler.preempt("parent")
    child = request("child", PROMPTS[0], PENALTIES)
    child.output_token_ids = list(parent.output_token_ids)
    engine.scheduler.fork("parent", child)
    engine.abort("parent")
    with pytest.raises(InvalidRequestError, match="cannot be forked"):
        engine.scheduler.fork("parent", replace_id(child, "orphan"))
    finish(engine, run)
    assert child.output_token_ids == said_alone(plain, PROMPTS[0], PENALTIES)


def replace_id(item: Request, name: str) -> Request:
    copy = request(name, item.prompt_token_ids, item.params)
    copy.output_token_ids = list(item.output_token_ids)
    return copy


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "decoding"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_whose_leader_is_aborted(plain: Engine, when: str, prefix_cache: bool) -> None:
    engine, run = make(max_chunk=7, prefix_cache=prefix_cache), Run()
    params = replace(PENALTIES, seed=21)
    items = [request(f"c{i}", PROMPTS[0], params, choice=i) for i in range(4)]
    for item in items:
        item.leader_id = None if item is items[0] else "c0"
        engine.add(item)
    if when == "in its prompt":
        step(engine, run)
        step(engine, run)
        assert all(item.status is Status.WAITING for item in items[1:]), "they share its prompt"
    elif when == "decoding":
        step_until(engine, run, items[0], 2)
    engine.abort("c0")
    finish(engine, run)
    assert run.finish == {"c0": "abort", "c1": "length", "c2": "length", "c3": "length"}
    for i in (1, 2, 3):
        assert run.tokens[f"c{i}"] == said_alone(plain, PROMPTS[0], params, choice=i)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_pool_of_exactly_one_request(plain: Engine, asynchronous: bool) -> None:
    """Every prompt, with its output, fills the pool to the last slot; so does one of capacity."""
    num_prompt = 27
    capacity = num_prompt + GREEDY.max_tokens - 1  # the last token needs none
    engine = make(num_pages=1 + capacity // PAGE, asynchronous=asynchronous)
    assert engine.capacity_tokens == capacity
    prompts = [[*prompt, *[1] * num_prompt][:num_prompt] for prompt in PROMPTS]
    full = random_prompts(1, (capacity, capacity))[0]
    requests = [request(str(i), p, GREEDY) for i, p in enumerate((*prompts, full, prompts[0]))]
    run = drive(engine, requests)
    for i, prompt in enumerate(prompts):
        assert run.tokens[str(i)] == said_alone(plain, prompt, GREEDY)
    assert run.tokens["4"] == run.tokens["0"]
    assert run.tokens["3"] == said_alone(plain, full, GREEDY)[:1]
    with pytest.raises(InvalidRequestError, match="pool holds"):
        engine.add(request("more", [*full, 1], GREEDY))


@pytest.mark.parametrize("length", range(2 * PAGE, 3 * PAGE + 1))
def test_hits_that_end_at_the_prompts_end(plain: Engine, length: int) -> None:
    """The last token is run in any case, whole pages or not; one more or less changes nothing."""
    engine = make()
    base = random_prompts(1, (40, 40))[0]
    for name, end in (
        ("first", length),
        ("again", length),
        ("less", length - 1),
        ("more", length + 1),
    ):
        item = request(name, base[:end], PENALTIES)
        run = drive(engine, [item])
        assert run.tokens[name] == said_alone(plain, base[:end], PENALTIES)
        assert item.num_cached_tokens <= end - 1
        if name != "first":
            assert item.num_cached_tokens >= (end - 1) // PAGE * PAGE


def test_b12_salts_and_adapters_share_nothing(plain: Engine) -> None:
    engine = make()
    expected = said_alone(plain, PROMPTS[0], GREEDY)
    for salt, adapter in (("", 0), ("X", 0), ("", 1), ("X", 1), ("1", 0), ("X1", 0)):
        for hits in (False, True):
            item = request("it", PROMPTS[0], GREEDY)
            item.cache_salt, item.adapter_id = salt, adapter
            assert drive(engine, [item]).tokens["it"] == expected
            assert (item.num_cached_tokens > 0) == hits


def test_b12_salts_share_nothing_while_all_run_or_come_back_from_host_memory() -> None:
    engine = make(pages=34, kv_host_memory=1 << 16)
    engine.scheduler.step_times.swap_is_cheaper = lambda *_: True  # type: ignore[method-assign]
    for hits in (False, True):
        items = [request(salt, PROMPTS[0], GREEDY) for salt in "abcdef"]
        for item in items:
            item.cache_salt = item.request_id
        run = drive(engine, items)
        assert len(set(map(tuple, run.tokens.values()))) == 1
        assert [item.num_cached_tokens > 0 for item in items] == [hits] * 6
    assert engine.kv_manager.stats.loaded_pages > 0


def test_b01_nobody_waits_behind_what_is_refused_or_idles(plain: Engine) -> None:
    """Prompts of the pool's capacity and one more, then a small one: no idle step while work is."""
    engine = make(num_pages=20)
    stats = collect_stats(engine)
    full = random_prompts(1, (76, 76))[0]
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="76"):
        engine.add(request("huge", [*full, 1], GREEDY))
    assert time.monotonic() - began < 1
    run = drive(engine, [request(str(i), full, GREEDY) for i in range(3)]
                + [request("small", PROMPTS[0][:5], GREEDY)])  # fmt: skip
    assert set(run.finish.values()) == {"length"}
    assert run.tokens["small"] == said_alone(plain, PROMPTS[0][:5], GREEDY)
    idle = [step.step_tokens == 0 for step in stats]
    assert not any(all(idle[i : i + 4]) for i in range(len(idle) - 3))


def test_b54_neighbours_keep_their_bits_whatever_the_bucket() -> None:
    """The pages of who has ended are not touched by steps of any size, nor by their padding."""
    engine = make(num_pages=AMPLE)
    item = request("it", PROMPTS[0], GREEDY)
    engine.add(item)
    run = Run()
    step_until(engine, run, item, 5)
    pages = list(item.pages[0])
    finish(engine, run)
    before = [leaf[pages] for leaf in arrays(engine)]
    others = [
        request(f"{n}-{i}", [7 * i + n] * n, GREEDY) for n in (1, 3, 17, 60, 90) for i in range(3)
    ]
    drive(engine, others)
    assert all(
        np.array_equal(a, leaf[pages]) for a, leaf in zip(before, arrays(engine), strict=True)
    )


def arrays(engine: Engine) -> list[np.ndarray]:
    pool = engine.runner.pool
    return [np.array(leaf) for leaf in (*pool.keys, *pool.values)]
