"""What the scheduler plans: admission, the content of a step, preemption, plans in flight."""

from dataclasses import replace

import pytest

from jaxserve.engine.request import Status
from jaxserve.errors import InvalidRequestError, QueueFullError
from tests.support.scheduler_harness import LIMITS, Harness, ids, make_request

# ---------------------------------------------------------------- B01: requests that cannot fit


def b01_harness() -> Harness:
    limits = replace(LIMITS, max_batch_tokens=512)
    return Harness(limits, num_pages=50, page_size=16)


def test_b01_prompt_over_the_pool_is_refused_and_blocks_nobody():
    harness = b01_harness()
    with pytest.raises(InvalidRequestError, match=r"1000 tokens .* holds 784 \(49 pages") as error:
        harness.add(make_request("huge", 1000))
    assert error.value.param == "prompt"
    small = make_request("small", 5)
    harness.add(small)
    harness.drain(max_steps=5)
    harness.check_outputs(small)


def test_b01_prompt_of_exactly_the_capacity_ends_and_one_more_is_refused():
    harness = b01_harness()
    full = make_request("full", 784, max_tokens=100)
    harness.add(full)
    with pytest.raises(InvalidRequestError, match="785 tokens"):
        harness.add(make_request("over", 785))
    behind = make_request("behind", 5)
    harness.add(behind)
    harness.drain(max_steps=7)
    assert len(full.output_token_ids) == 1
    assert harness.finished["full"][1] == "length"
    harness.check_outputs(full, behind)


def test_b01_output_that_outgrows_the_pool_ends_with_length():
    harness = b01_harness()
    long = make_request("long", 700, max_tokens=4000)
    harness.add(long, make_request("other", 40, max_tokens=60))
    harness.drain(max_steps=400)
    assert len(long.output_token_ids) == 784 + 1 - 700
    assert harness.finished["long"][1] == "length"
    harness.check_outputs(long)


def test_b01_no_idle_step_while_the_pool_is_contended():
    harness = b01_harness()
    requests = [make_request(str(i), 180 + 7 * i, max_tokens=120) for i in range(8)]
    harness.add(*requests)
    while harness.scheduler.has_work:
        assert not harness.step().is_empty
    harness.check_outputs(*requests)
    assert sum(request.num_preemptions for request in requests) > 0


# ---------------------------------------------------------------- admission


def test_prompt_that_fills_the_context_is_refused():
    scheduler = Harness(replace(LIMITS, max_model_len=32)).scheduler
    scheduler.add(make_request("fits", 31))
    with pytest.raises(InvalidRequestError, match="32 tokens and the context length is 32"):
        scheduler.add(make_request("full", 32))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(make_request("empty", 0))
    assert ids(scheduler.waiting) == ["fits"]


def test_full_queue_and_repeated_id_change_nothing():
    harness = Harness(replace(LIMITS, max_queue=1, max_batch_rows=1))
    harness.add(make_request("a", 3), make_request("b", 3))
    with pytest.raises(QueueFullError, match="0 requests are running and 2 are waiting"):
        harness.add(make_request("c", 3))
    harness.step()
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        harness.add(make_request("a", 3))
    with pytest.raises(QueueFullError, match="1 requests are running and 1 are waiting"):
        harness.add(make_request("c", 3))
    harness.scheduler.abort("b")
    harness.add(make_request("b", 3))
    harness.drain()
    harness.add(make_request("c", 3))
    harness.drain()
    assert set(harness.finished) == {"a", "b", "c"}


def test_order_is_priority_then_arrival():
    harness = Harness(replace(LIMITS, max_batch_rows=2))
    late = make_request("late", 3)
    late.arrival_time = 5.0
    harness.add(late, make_request("low", 3, priority=1), make_request("early", 3))
    harness.add(make_request("urgent", 3, priority=-1))
    assert ids(harness.scheduler.waiting) == ["urgent", "early", "late", "low"]
    assert ids(harness.step().prefill) == ["urgent", "early"]


def test_nobody_overtakes_a_head_that_waits_for_pages():
    harness = Harness(num_pages=11, page_size=4)
    harness.add(make_request("a", 16, max_tokens=20))
    harness.step()
    harness.add(make_request("big", 36), make_request("tiny", 2))
    while "a" not in harness.finished:
        assert ids(harness.scheduler.running) == ["a"]
        harness.step()
    harness.drain()
    assert list(harness.finished)[:1] == ["a"]


def test_a_newcomer_leaves_a_page_for_each_request_that_may_grow():
    harness = Harness(num_pages=8, page_size=4)
    harness.add(make_request("a", 9, max_tokens=20))
    harness.step()
    harness.add(make_request("b", 16, max_tokens=1))
    assert not harness.step().prefill  # 4 pages are free and b needs 4, but a may need one
    short = Harness(num_pages=8, page_size=4)
    short.add(make_request("a", 9, max_tokens=4))  # 12 tokens with KV: its 3 pages are enough
    short.step()
    short.add(make_request("b", 16, max_tokens=1))
    assert ids(short.step().prefill) == ["b"]


# ---------------------------------------------------------------- what a step holds


def test_a_long_prompt_stalls_no_stream():
    harness = Harness(replace(LIMITS, max_batch_tokens=16), num_pages=400)
    harness.add(make_request("stream", 4, max_tokens=80))
    harness.step()
    harness.add(make_request("long", 1000))
    for _ in range(60):
        plan = harness.step()
        assert ids(plan.decode) == ["stream"]
        assert [(i.request.request_id, i.num_tokens) for i in plan.prefill] == [("long", 16)]


def test_begun_prompts_go_before_newcomers_and_rows_are_limited():
    limits = replace(LIMITS, max_batch_tokens=10, max_prefill_rows=2)
    harness = Harness(limits)
    harness.add(make_request("a", 15), make_request("b", 4), make_request("c", 4))
    first = harness.step()
    assert [(i.request.request_id, i.num_tokens, i.samples) for i in first.prefill] == [
        ("a", 10, False)
    ]
    second = harness.step()
    assert [(i.request.request_id, i.start, i.num_tokens) for i in second.prefill] == [
        ("a", 10, 5),
        ("b", 0, 4),
    ]
    assert [i.samples for i in second.prefill] == [True, True]


def test_prompts_of_one_token_take_decode_rows():
    harness = Harness(replace(LIMITS, max_batch_tokens=3))
    harness.add(make_request("long", 9), make_request("one", 1))
    plan = harness.step()
    assert (ids(plan.decode), ids(plan.prefill)) == (["one"], ["long"])


def test_chunks_fill_a_bucket_where_padding_would_be_dear():
    limits = replace(LIMITS, max_batch_tokens=512, prefill_sizes=(64, 128, 256, 512))
    harness = Harness(limits, num_pages=400)
    request = make_request("a", 260)
    harness.add(request)
    assert [item.num_tokens for item in harness.step().prefill] == [256]
    assert [item.num_tokens for item in harness.step().prefill] == [4]
    harness.drain()
    harness.check_outputs(request)


def test_max_chunk_bounds_each_prompt():
    harness = Harness(replace(LIMITS, max_chunk=7))
    harness.add(make_request("a", 15), make_request("b", 20))
    sizes = [[i.num_tokens for i in harness.step().prefill] for _ in range(3)]
    assert sizes == [[7, 7], [7, 7], [6]]  # the last token of a is a decode row


# ---------------------------------------------------------------- preemption


def test_the_youngest_is_preempted_and_keeps_its_output_and_its_place():
    harness = Harness(num_pages=8, page_size=4)
    requests = [make_request(name, 7, max_tokens=12) for name in ("old", "young")]
    harness.add(*requests)
    plans = [harness.step() for _ in range(2)]
    while not plans[-1].preempted:
        plans.append(harness.step())
    old, young = requests
    assert plans[-1].preempted == (young,)
    assert ids(plans[-1].decode) == ["old"]
    assert young.status is Status.WAITING
    assert young.output_token_ids
    assert (young.num_computed, young.pages, young.num_preemptions) == (0, (), 1)
    harness.add(make_request("newer", 2))
    assert ids(harness.scheduler.waiting) == ["young", "newer"]
    harness.drain()
    assert next(iter(harness.finished)) == "old"
    assert old.num_preemptions == 0
    harness.check_outputs(*requests)


def test_low_priority_is_preempted_first_though_it_came_first():
    harness = Harness(num_pages=8, page_size=4)
    low = make_request("low", 7, max_tokens=12, priority=3)
    high = make_request("high", 7, max_tokens=12)
    harness.add(low, high)
    harness.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    harness.check_outputs(low, high)


def test_a_step_that_preempts_admits_nobody():
    """Not even a request of higher priority that the freed pages would hold."""
    harness = Harness(num_pages=9, page_size=4)
    harness.add(make_request("a", 8, max_tokens=30), make_request("b", 15, max_tokens=9))
    harness.step()
    harness.add(make_request("urgent", 7, max_tokens=1, priority=-1))
    plan = harness.step()
    while not plan.preempted:
        assert not plan.prefill
        plan = harness.step()
    assert ids(plan.decode) == ["a"]
    assert not plan.prefill
    assert ids(harness.step().prefill) == ["urgent"]


def test_preempt_on_demand_and_preempt_all():
    harness = Harness()
    requests = [make_request(name, 9, max_tokens=8) for name in "abc"]
    harness.add(*requests)
    harness.step()
    harness.step()
    assert harness.scheduler.preempt("b") is requests[1]
    assert harness.scheduler.preempt("b") is None
    assert harness.scheduler.preempt("unknown") is None
    harness.step()
    assert harness.scheduler.preempt_all() == tuple(requests)
    assert harness.manager.num_used == 0
    harness.scheduler.check_integrity()
    harness.drain()
    harness.check_outputs(*requests)


def test_a_failed_step_is_void_and_everybody_is_recomputed():
    harness = Harness()
    requests = [make_request(name, 9, max_tokens=8) for name in "abc"]
    harness.add(*requests)
    harness.step()
    harness.schedule()  # this step's device call fails: no commit
    harness.lose_pool()
    harness.drain()
    harness.check_outputs(*requests)


# ---------------------------------------------------------------- plans in flight


def test_the_next_plan_does_not_wait_for_the_tokens_of_this_one():
    harness = Harness(depth=1)
    request = make_request("r", 5, 3)
    harness.add(request)
    plans = [harness.schedule() for _ in range(4)]
    starts = [[item.start for item in (*plan.prefill, *plan.decode)] for plan in plans]
    assert starts == [[0], [5], [6], []]  # three draws: max_tokens is known beforehand
    assert request.num_computed == 0


def test_results_of_a_preempted_request_are_dropped():
    harness = Harness(depth=1)
    request = make_request("r", 5, 6)
    harness.add(request)
    stale = harness.schedule()
    tokens = harness.run(stale)
    harness.scheduler.preempt("r")
    harness.schedule()
    assert harness.scheduler.commit(stale, tokens) == []
    assert (request.num_computed, request.output_token_ids) == (0, [])
    harness.scheduler.check_integrity()


def test_commits_out_of_order_are_a_bug():
    harness = Harness()
    harness.add(make_request("r", 5, 6))
    harness.schedule()
    later = harness.schedule()
    with pytest.raises(AssertionError, match="in order"):
        harness.scheduler.commit(later, {"r": [1]})


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_chunk", [None, 16, 7, 1])
@pytest.mark.parametrize("num_pages", [200, 14])
@pytest.mark.parametrize("rows", [1, 4])
def test_outputs_do_not_depend_on_how_they_were_scheduled(
    depth: int, max_chunk: int | None, num_pages: int, rows: int
):
    limits = replace(LIMITS, max_chunk=max_chunk, max_batch_rows=rows)
    harness = Harness(limits, num_pages=num_pages, depth=depth)
    requests = [
        make_request(f"r{i}", 1 + 2 * i, 18 + 2 * i, ignore_eos=i % 3 != 2) for i in range(7)
    ]
    harness.add(*requests)
    harness.drain()
    harness.check_outputs(*requests)
    if num_pages == 14 and rows == 4:
        assert any(request.num_preemptions for request in requests)
