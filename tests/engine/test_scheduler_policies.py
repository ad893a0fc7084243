"""Who runs when: policies and ageing, static batches, windowed groups, the time a step may take."""

from collections import Counter
from dataclasses import replace

import pytest

from jaxserve.engine.plan import Limits
from jaxserve.engine.step_times import DEFAULT_MAX_STALL, StepTimes
from jaxserve.engine.waiting_queue import MAX_OVERTAKES
from jaxserve.errors import InvalidRequestError
from tests.support.scheduler_harness import LIMITS, Harness, ids, make_request

# ---------------------------------------------------------------- policies


def order_of_entry(harness: Harness, steps: int = 100) -> list[str]:
    names: list[str] = []
    for _ in range(steps):
        plan = harness.step()
        new = [name for name in ids((*plan.prefill, *plan.decode)) if name not in names]
        names += new
        if not harness.scheduler.has_work:
            break
    return names


def test_fcfs_ignores_priorities():
    harness = Harness(replace(LIMITS, policy="fcfs", max_batch_rows=1))
    requests = [make_request(name, 3, 2, priority=p) for name, p in (("a", 3), ("b", -3), ("c", 0))]
    requests[2].arrival_time = -1.0
    harness.add(*requests)
    assert order_of_entry(harness) == ["c", "a", "b"]


def test_prefix_takes_the_longest_cached_prompt_first():
    harness = Harness(
        replace(LIMITS, policy="prefix", max_batch_rows=1), page_size=4, prefix_cache=True
    )
    first = make_request("first", 20, 2)
    harness.add(first)
    harness.drain()
    stem = first.prompt_token_ids
    harness.add(
        make_request("new", 9, 2),
        make_request("half", 3, 2, stem=stem[:8]),
        make_request("whole", 3, 2, stem=stem),
    )
    assert order_of_entry(harness) == ["whole", "half", "new"]
    assert harness.scheduler.manager.stats.hit_tokens >= 8 + 20


@pytest.mark.parametrize("policy", ["priority", "prefix"])
def test_a_stream_of_better_requests_starves_nobody(policy: str):
    """While they keep coming, one that is always overtaken enters, and is not thrown out again."""
    limits = replace(LIMITS, policy=policy, max_batch_rows=2)
    harness = Harness(limits, num_pages=30, page_size=4, prefix_cache=True)
    stem = make_request("stem", 16).prompt_token_ids
    starving = make_request("starving", 30, 40, priority=9)
    harness.add(make_request("first", 4, 3, stem=stem))
    harness.drain()  # the stem is cached
    harness.add(*(make_request(x, 4, 3, priority=-1, stem=stem) for x in "xy"), starving)
    num_entered = 0
    for i in range(600):
        if harness.scheduler.num_waiting < 4:
            harness.add(make_request(f"{i}", 4, 3, priority=-1, stem=stem))
        running = set(harness.scheduler.running)
        harness.step()
        if starving.num_computed == 0:
            num_entered += len(set(harness.scheduler.running) - running)
        if "starving" in harness.finished:
            break
    assert MAX_OVERTAKES <= num_entered <= MAX_OVERTAKES + 4
    assert starving.num_preemptions == 0
    harness.check_outputs(starving)


# ---------------------------------------------------------------- static batching


def test_a_static_batch_ends_as_one():
    limits = replace(LIMITS, batching="static", max_batch_rows=4, max_prefill_rows=2)
    harness = Harness(limits)
    harness.add(*(make_request(f"{i}", 5, 3 + 4 * i) for i in range(6)))
    running: list[set[str]] = []
    while harness.scheduler.has_work:
        harness.step()
        running.append(set(ids(harness.scheduler.running)))
    assert running[0] == {"0", "1"}  # two rows of prompts a step
    assert running[1] == {"0", "1", "2", "3"}
    empty = running.index(set())
    assert empty == 1 + 15 - 1  # "3" came a step late and has 15 tokens
    assert all(names <= {"0", "1", "2", "3"} for names in running[:empty])
    assert all(names <= {"4", "5"} for names in running[empty:])
    assert set(harness.finished) == {str(i) for i in range(6)}


def test_a_static_batch_is_what_waited_when_it_began_and_what_the_pool_holds():
    limits = replace(LIMITS, batching="static", max_batch_rows=4)
    harness = Harness(limits)
    harness.add(make_request("a", 5, 4))
    harness.step()
    harness.add(make_request("late", 5, 4))
    assert not harness.step().prefill
    harness.drain()
    tight = Harness(limits, num_pages=9, page_size=4)
    tight.add(make_request("a", 9, 2), make_request("b", 9, 8), make_request("c", 9, 3))
    while "b" not in tight.finished:
        tight.step()
        assert "c" not in ids(tight.scheduler.running)  # "a" left room for it long ago
    tight.drain()
    assert list(tight.finished) == ["a", "b", "c"]


# ---------------------------------------------------------------- windowed groups


def test_windowed_groups_take_and_give_back_pages_as_the_prompt_goes_on():
    limits = replace(LIMITS, max_batch_tokens=8, max_batch_rows=2)
    harness = Harness(limits, num_pages=60, page_size=4, windows=(9, None))
    request = make_request("r", 101, 20)
    harness.add(request)
    held = []
    while harness.scheduler.has_work:
        harness.step()
        held.append([sum(page > 0 for page in pages) for pages in request.pages])
    assert max(windowed for windowed, _ in held[:-1]) <= 5  # 8 before, 8 to come
    assert max(full for _, full in held[:-1]) == 30
    harness.check_outputs(request)


def test_a_prompt_in_chunks_preempts_the_youngest_for_its_windowed_pages():
    """Its windowed group takes pages when they are due; younger ones have taken them since."""
    limits = replace(LIMITS, max_batch_tokens=4, max_batch_rows=4)
    harness = Harness(limits, num_pages=26, page_size=2, windows=(12, 12))
    long = make_request("long", 60, 4)
    harness.add(long)
    harness.step()
    harness.add(make_request("young", 2, 40), make_request("younger", 3, 40))
    preempted = Counter()  # type: ignore[var-annotated]
    while harness.scheduler.has_work:
        oldest = harness.scheduler.running[0] if harness.scheduler.running else None
        plan = harness.step()
        preempted.update(ids(plan.preempted))
        if oldest is not None:
            assert oldest in [item.request for item in (*plan.decode, *plan.prefill)]
    assert preempted["long"] == 0
    assert preempted["younger"] > 0
    for request, _ in harness.finished.values():
        harness.check_outputs(request)


def test_a_newcomer_leaves_the_pages_that_a_windowed_prompt_will_come_to_need():
    limits = replace(LIMITS, max_batch_tokens=8, max_chunk=4)
    harness = Harness(limits, num_pages=10, page_size=2, windows=(8,))
    harness.add(make_request("long", 40, 2))
    harness.step()
    harness.add(make_request("young", 8, 8))
    assert harness.manager.num_free == 7
    assert harness.manager.pages_needed(40) == 8  # it has two of them
    while "long" not in harness.finished:
        assert not harness.step().preempted
    harness.drain()
    assert [request.num_preemptions for request, _ in harness.finished.values()] == [0, 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("windows", [(6,), (6, None), (4, 9, None)])
@pytest.mark.parametrize("max_chunk", [None, 7, 1])
def test_outputs_do_not_depend_on_windows_caches_or_chunks(
    depth: int, prefix_cache: bool, windows: tuple[int | None, ...], max_chunk: int | None
):
    limits = replace(LIMITS, max_chunk=max_chunk, max_batch_tokens=16)
    harness = Harness(
        limits, num_pages=14 * len(windows), windows=windows, prefix_cache=prefix_cache,
        host_pages=20 if prefix_cache else 0, depth=depth,
    )  # fmt: skip
    stem = make_request("stem", 10).prompt_token_ids
    requests = [
        make_request(f"r{i}", 1 + 2 * i, 18 + i, stem=stem[: 5 * (i % 3)]) for i in range(7)
    ]
    harness.add(*requests)
    harness.drain()
    harness.check_outputs(*requests)


def test_b01_prompt_of_the_capacity_in_every_group_and_one_more():
    for windows in ((8,), (8, None), (8, 8, None)):
        limits = replace(LIMITS, max_batch_tokens=8)
        harness = Harness(limits, num_pages=40, page_size=4, windows=windows)
        capacity = harness.manager.capacity_tokens
        if windows == (8,):  # one window holds any length
            assert capacity > 10**6
            continue
        full = make_request("full", capacity, 9)
        harness.add(full, make_request("behind", 5))
        with pytest.raises(InvalidRequestError, match=rf"{capacity + 1} tokens .* \(39 pages of 4"):
            harness.add(make_request("over", capacity + 1))
        harness.drain(max_steps=capacity)
        assert harness.finished["full"] == (full, "length")
        assert len(full.output_token_ids) == 1
        assert "behind" in harness.finished


def test_b14_prompts_around_the_context_length():
    """Nothing is cut: what leaves no room for a token is refused with both numbers."""
    for num_prompt, num_output in ((62, 2), (63, 1)):
        harness = Harness(replace(LIMITS, max_model_len=64))
        request = make_request("r", num_prompt, 500)
        harness.add(request)
        harness.drain()
        assert harness.finished["r"] == (request, "length")
        assert len(request.output_token_ids) == num_output
        harness.check_outputs(request)
    for num_prompt in (64, 65):
        with pytest.raises(InvalidRequestError, match=f"{num_prompt} tokens and .* is 64"):
            Harness(replace(LIMITS, max_model_len=64)).add(make_request("r", num_prompt))


# ---------------------------------------------------------------- predicted time

SIZES = (64, 128, 256, 512)
TIMED = Limits(
    max_batch_rows=4, max_batch_tokens=512, max_prefill_rows=4, max_model_len=8192, max_queue=10,
    prefill_sizes=SIZES,
)  # fmt: skip


def seconds(num_decode: int, num_prefill: int) -> float:
    """A device on which a step costs 10 ms and a prefill token 0.1 ms, padding included."""
    size = next((size for size in SIZES if size >= num_prefill), 0) if num_prefill else 0
    return 0.010 + 0.0001 * size + 0.0001 * num_decode


def test_a_long_prompt_stalls_no_stream_for_more_than_three_steps():
    times = StepTimes()
    harness = Harness(TIMED, num_pages=2000, page_size=8, step_times=times)

    def step() -> float:
        plan = harness.step()
        took = seconds(len(plan.decode), plan.num_prefill_tokens)
        times.observe(len(plan.decode), plan.num_prefill_tokens, took)
        return took

    harness.add(make_request("warm", 700, 2))
    step()  # nobody decodes: as large as can be
    assert times.prefill_limit(0, SIZES) == 512
    harness.drain()
    harness.add(*(make_request(f"stream{i}", 20, 200) for i in range(3)))
    gaps = [step() for _ in range(20)]
    usual = sorted(gaps)[10]
    long = make_request("long", 6000, 2)
    harness.add(long)
    sizes = []
    while not long.output_token_ids:
        before = long.num_computed
        gaps.append(step())
        sizes.append(long.num_computed - before)
    assert max(gaps[2:]) <= DEFAULT_MAX_STALL * usual <= 3 * usual
    assert max(sizes) == 128  # 10 + 12.8 ms; 256 would take 35.6
    harness.scheduler.abort("stream0")
    harness.scheduler.abort("stream1")
    harness.scheduler.abort("stream2")
    harness.scheduler.abort("long")
    harness.add(make_request("alone", 1000, 2))
    assert harness.step().num_prefill_tokens == 512


def test_steps_are_never_starved_by_the_time_budget():
    """Even where the smallest size is too slow, the prompt gets it in every step."""
    times = StepTimes()
    for size in SIZES:
        times.observe(1, size, size / 10)
    times.observe(1, 0, 0.001)
    harness = Harness(TIMED, num_pages=2000, page_size=8, step_times=times)
    harness.add(make_request("stream", 5, 200))
    harness.step()
    harness.add(make_request("long", 640, 2))
    sizes = [harness.step().num_prefill_tokens for _ in range(10)]
    assert sizes == [64] * 10


def test_swapping_is_decided_by_what_was_measured():
    times = StepTimes()
    harness = Harness(TIMED, page_size=4, prefix_cache=True, host_pages=8, step_times=times)
    harness.add(make_request("r", 5, 200))
    harness.step()
    assert harness.manager.swap_is_cheaper
    times.observe(0, 64, 0.64)
    times.observe_copy(2, 1.0)
    harness.step()
    assert not harness.manager.swap_is_cheaper  # 1 s for a page both ways, 0.04 s to compute it
