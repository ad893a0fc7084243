"""Real engines that share, move and give back KV: no token changes. And deadlines."""

import time
from types import SimpleNamespace

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import (
    drive,
    random_prompts,
    request,
    single_steps,
    tiny_engine,
    tiny_model,
)

MODEL = tiny_model()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


def family(prompt: list[int], count: int, params: SamplingParams) -> list[Request]:
    requests = [request(f"c{i}", prompt, params, choice=i) for i in range(count)]
    for follower in requests[1:]:
        follower.leader_id = "c0"
    return requests


@pytest.fixture(scope="module")
def plain() -> Engine:
    return tiny_engine(MODEL, prefix_cache=False)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_prompt", [5, 43])
def test_choices_that_share_a_prompt_equal_those_that_do_not(
    plain: Engine, prefix_cache: bool, params: SamplingParams, num_prompt: int
):
    prompt = random_prompts(1, (num_prompt, num_prompt))[0]
    engine = tiny_engine(MODEL, prefix_cache=prefix_cache, pages=34)
    alone = [request(f"c{i}", prompt, params, choice=i) for i in range(4)]
    expected = drive(plain, alone, together=False)
    choices = family(prompt, 4, params)
    got = drive(engine, choices)
    assert got.tokens == expected.tokens
    if num_prompt > 5:
        assert all(choice.num_cached_tokens >= 40 for choice in choices[1:])


def test_forks_equal_independent_runs(plain: Engine):
    prompt = random_prompts(1, (21, 21))[0]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = drive(plain, [request("r", prompt, params)]).tokens["r"]
    engine = tiny_engine(MODEL)
    parent = request("parent", prompt, params)
    engine.add(parent)
    while len(parent.output_token_ids) < 9:
        engine.step()
    child = request("child", prompt, params)
    child.output_token_ids = list(parent.output_token_ids)
    engine.scheduler.fork("parent", child)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert child.num_cached_tokens >= len(prompt)
    assert parent.output_token_ids == child.output_token_ids == expected


def test_evicted_prompts_come_back_from_host_memory(plain: Engine):
    prompts = random_prompts(6, (60, 60))
    requests = [request(f"{n}-{i}", prompt, GREEDY) for n in range(3)
                for i, prompt in enumerate(prompts)]  # fmt: skip
    expected = drive(plain, [request(f"{i}", p, GREEDY) for i, p in enumerate(prompts)])
    engine = tiny_engine(MODEL, pages=40, kv_host_memory=1 << 20)
    engine.scheduler.step_times.observe_copy(1, 1e-9)  # that it pays is not the question here
    got = drive(engine, requests)
    stats = engine.kv_manager.stats
    assert stats.stored_pages > 0
    assert stats.loaded_pages > 0
    for item in requests:
        assert got.tokens[item.request_id] == expected.tokens[item.request_id[2:]]


def test_a_request_out_of_time_ends_with_what_it_has(monkeypatch: pytest.MonkeyPatch):
    engine = single_steps(tiny_engine(MODEL, max_batch_rows=2))
    prompts = random_prompts(3, (9, 9))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [request(name, p, params) for name, p in zip("abc", prompts, strict=True)]
    for item, hours in zip(requests, (1, None, 1), strict=True):  # "c" waits for a row
        item.deadline = None if hours is None else time.monotonic() + 3600 * hours
        engine.add(item)
    events = [event for _ in range(5) for event in engine.step()]
    assert not any(event.finish_reason for event in events)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
    monkeypatch.setattr("jaxserve.engine.step_report.time", later)
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"a": "timeout", "b": "length", "c": "timeout"}
    num_tokens = {name: sum(e.request_id == name and bool(e.token_ids) for e in events)
                  for name in "abc"}  # fmt: skip
    assert 0 < num_tokens["a"] < num_tokens["b"] == 40
    assert num_tokens["c"] == 0
    assert engine.kv_manager.num_used == 0
