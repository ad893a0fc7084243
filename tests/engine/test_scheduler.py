"""The scheduler against a fake model that reads its context back from the pages it was given.

A page lent to two requests, a chunk skipped or run twice, or a token appended twice changes the
fake model's tokens; every run is compared with the plain loop in `expected_output`.
"""

import itertools
import zlib
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import Committed, Limits, Plan
from jaxserve.engine.request import Request, Status
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.sampling_params import SamplingParams

VOCAB = 40
EOS = 0
LIMITS = Limits(
    max_batch_rows=4, max_batch_tokens=64, max_prefill_rows=4, max_model_len=4096, max_queue=100
)


def next_token(context: list[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCAB


def make_request(
    request_id: str, num_prompt: int, max_tokens: int = 5, *, priority: int = 0, **params: object
) -> Request:
    """ignore_eos unless the test says otherwise, so that lengths are known."""
    values = {"max_tokens": max_tokens, "ignore_eos": True, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(zlib.crc32(f"{request_id}{i}".encode()) % VOCAB
                               for i in range(num_prompt)),
        params=SamplingParams(**values),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        seed=0,
        eos_token_ids=(EOS,),
        priority=priority,
    )  # fmt: skip


def expected_output(request: Request, max_total: int) -> tuple[list[int], str]:
    """The same run with no pages, chunks, batches or preemptions."""
    params = request.params
    prompt = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        output.append(next_token(prompt + output))
        stops = output[-1] in params.stop_token_ids
        stops |= output[-1] == EOS and not params.ignore_eos
        if stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens or len(prompt) + len(output) == max_total:
            return output, "length"


class Harness:
    """A scheduler, the fake device, and the loop between them; `depth` plans may be in flight."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        num_pages: int = 200,
        page_size: int = 4,
        num_groups: int = 2,
        depth: int = 0,
    ) -> None:
        self.allocator = PageAllocator(num_pages, page_size, num_groups)
        self.scheduler = Scheduler(limits, self.allocator)
        self.max_total = min(limits.max_model_len, self.allocator.capacity_tokens + 1)
        self.depth = depth
        self.in_flight: deque[tuple[Plan, dict[str, int]]] = deque()
        self.slots: dict[int, int] = {}
        self.drawn: dict[str, int] = {}
        self.covered: Counter[tuple[str, int]] = Counter()
        self.finished: dict[str, tuple[Request, str]] = {}
        self.steps = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.scheduler.check_integrity()

    def step(self) -> Plan:
        """Schedule and run one step, then commit what is older than `depth`."""
        plan = self.schedule()
        if plan.is_empty:
            assert self.in_flight or not self.scheduler.has_work, "work, but nothing scheduled"
        else:
            self.steps += 1
            self.in_flight.append((plan, self.run(plan)))
        while len(self.in_flight) > (0 if plan.is_empty else self.depth):
            self.commit()
        return plan

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        limits = self.scheduler.limits
        ids = [item.request.request_id for item in (*plan.decode, *plan.prefill)]
        assert len(ids) == len(set(ids)) <= limits.max_batch_rows
        assert len(plan.prefill) <= limits.max_prefill_rows
        assert plan.num_prefill_tokens <= limits.max_batch_tokens
        assert all(item.num_tokens == 1 and item.samples for item in plan.decode)
        assert all(item.num_tokens >= 1 for item in plan.prefill)
        if limits.max_chunk:
            assert all(item.num_tokens <= limits.max_chunk for item in plan.prefill)
        return plan

    def commit(self) -> list[Committed]:
        plan, tokens = self.in_flight.popleft()
        committed = self.scheduler.commit(plan, tokens)
        self.scheduler.check_integrity()
        for request, token, reason, _ in committed:
            assert request.output_token_ids[-1] == token
            if reason is not None:
                assert request.request_id not in self.finished
                assert request.status is Status.FINISHED
                self.finished[request.request_id] = (request, reason)
        return committed

    def run(self, plan: Plan) -> dict[str, int]:
        """All writes, then all reads, as a step does. Chunks must follow each other exactly."""
        items = (*plan.decode, *plan.prefill)
        for item in items:
            request = item.request
            key = (request.request_id, request.num_preemptions)
            assert item.start == self.covered[key]
            self.covered[key] += item.num_tokens
            tokens = request.token_ids(item.start, item.start + item.num_tokens)
            if not tokens:  # drawn by a step in flight: known to the device alone
                tokens = [self.drawn[request.request_id]]
            assert len(tokens) == item.num_tokens
            for position, token in enumerate(tokens, item.start):
                self.slots[self.slot(request, position)] = token
        drawn = {}
        for item in items:
            if item.samples:
                stop = item.start + item.num_tokens
                context = [self.slots[self.slot(item.request, i)] for i in range(stop)]
                drawn[item.request.request_id] = next_token(context)
        self.drawn.update(drawn)
        return drawn

    def slot(self, request: Request, position: int) -> int:
        page_size = self.allocator.page_size
        return request.pages[-1][position // page_size] * page_size + position % page_size

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        while self.in_flight:
            self.commit()
        assert not self.scheduler.has_work, f"still work after {max_steps} steps"
        assert self.allocator.num_used == 0

    def check_outputs(self, *requests: Request) -> None:
        for request in requests:
            output, reason = expected_output(request, self.max_total)
            assert request.output_token_ids == output, request.request_id
            assert self.finished[request.request_id] == (request, reason)


def ids(items: tuple) -> list[str]:
    return [getattr(item, "request", item).request_id for item in items]


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
    harness = Harness(replace(LIMITS, max_queue=2))
    harness.add(make_request("a", 3), make_request("b", 3))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        harness.add(make_request("c", 3))
    harness.step()
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        harness.add(make_request("a", 3))
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
    harness.add(make_request("a", 12, max_tokens=20))
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
    assert harness.allocator.num_used == 0
    harness.scheduler.check_integrity()
    harness.drain()
    harness.check_outputs(*requests)


def test_a_failed_step_is_void_and_everybody_is_recomputed():
    harness = Harness()
    requests = [make_request(name, 9, max_tokens=8) for name in "abc"]
    harness.add(*requests)
    harness.step()
    harness.schedule()  # this step's device call fails: no commit
    harness.scheduler.preempt_all()
    harness.covered.clear()
    harness.slots.clear()
    harness.drain()
    harness.check_outputs(*requests)


# ---------------------------------------------------------------- ends


def first_tokens(request: Request, count: int) -> list[int]:
    return expected_output(replace(request, max_tokens=count), 10**6)[0]


def test_eos_ends_with_stop_unless_ignored():
    eos_after = next(
        request for i in itertools.count()
        if EOS in first_tokens(request := make_request(f"r{i}", 3, 30), 10)
    )  # fmt: skip
    index = first_tokens(eos_after, 10).index(EOS)
    for ignore in (False, True):
        request = make_request(eos_after.request_id, 3, 30, ignore_eos=ignore)
        harness = Harness()
        harness.add(request)
        harness.drain()
        assert len(request.output_token_ids) == (30 if ignore else index + 1)
        assert harness.finished[request.request_id][1] == ("length" if ignore else "stop")


def test_stop_token_id_is_reported_and_waits_for_min_tokens():
    tokens = first_tokens(make_request("r", 3, 30), 30)
    stop = tokens[4]
    for min_tokens in (0, 4, 6):
        request = make_request("r", 3, 30, stop_token_ids=(stop,), min_tokens=min_tokens)
        harness = Harness()
        harness.add(request)
        reasons = []
        while harness.scheduler.has_work:
            plan = harness.schedule()
            harness.in_flight.append((plan, harness.run(plan)))
            reasons += [(c.finish_reason, c.stop_reason) for c in harness.commit()]
        end = next((i for i, t in enumerate(tokens) if t == stop and i >= min_tokens), None)
        if end is None:
            assert reasons[-1] == ("length", None)
        else:
            assert request.output_token_ids == tokens[: end + 1]
            assert reasons[-1] == ("stop", stop)
        assert set(reasons[:-1]) <= {(None, None)}


def test_stop_on_the_last_allowed_token_is_stop_not_length():
    stop = first_tokens(make_request("r", 3, 30), 1)[0]
    harness = Harness()
    harness.add(make_request("r", 3, 1, stop_token_ids=(stop,)))
    harness.drain()
    assert harness.finished["r"][1] == "stop"


def test_context_length_ends_with_length():
    harness = Harness(replace(LIMITS, max_model_len=20))
    request = make_request("r", 15, 100)
    harness.add(request)
    harness.drain()
    assert len(request.output_token_ids) == 5
    assert harness.finished["r"][1] == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_frees_everything_from_any_state(steps: int):
    harness = Harness(replace(LIMITS, max_batch_tokens=8))
    request = make_request("r", 13, 10)
    harness.add(request)
    for _ in range(steps):
        harness.step()
    assert harness.scheduler.abort("r") is request
    assert (request.status, request.pages) == (Status.FINISHED, ())
    assert harness.allocator.num_used == 0
    harness.scheduler.check_integrity()
    assert harness.scheduler.abort("r") is None
    assert harness.step().is_empty


def test_abort_between_schedule_and_commit_drops_the_row_alone():
    harness = Harness()
    requests = [make_request(name, 9, max_tokens=8) for name in "ab"]
    harness.add(*requests)
    plan = harness.schedule()
    tokens = harness.run(plan)
    harness.scheduler.abort("a")
    del tokens["a"]  # a row whose logits were NaN has no token
    again = make_request("a", 4)  # the same id, used anew at once
    harness.add(again)
    harness.in_flight.append((plan, tokens))
    assert [c.request for c in harness.commit()] == [requests[1]]
    harness.covered.clear()
    harness.covered[("b", 0)] = 9
    harness.drain()
    harness.check_outputs(requests[1], again)


def test_finish_cuts_the_output_at_the_stop_string():
    harness = Harness()
    request = make_request("r", 5, 20)
    harness.add(request)
    for _ in range(6):
        harness.step()
    expected = request.output_token_ids[:3]
    assert harness.scheduler.finish("r", 3) is request
    assert request.output_token_ids == expected
    assert request.status is Status.FINISHED
    assert harness.allocator.num_used == 0
    assert harness.scheduler.finish("r", 3) is None


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
        harness.scheduler.commit(later, {"r": 1})


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


# ---------------------------------------------------------------- everything at random


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic on small pools. The harness checks the invariants after every call."""

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.integers(1, 5),
        rows=st.integers(1, 5),
        prefill_rows=st.integers(1, 3),
        tokens=st.integers(1, 24),
        max_model_len=st.integers(2, 60),
        max_chunk=st.sampled_from([None, 1, 3]),
        sizes=st.booleans(),
        depth=st.integers(0, 1),
    )
    def create(
        self, num_pages: int, page_size: int, rows: int, prefill_rows: int, tokens: int,
        max_model_len: int, max_chunk: int | None, sizes: bool, depth: int,
    ) -> None:  # fmt: skip
        prefill_sizes = tuple(sorted({min(4, tokens), min(8, tokens), tokens})) if sizes else ()
        limits = Limits(
            max_batch_rows=rows, max_batch_tokens=tokens, max_prefill_rows=prefill_rows,
            max_model_len=max_model_len, max_queue=12, prefill_sizes=prefill_sizes,
            max_chunk=max_chunk,
        )  # fmt: skip
        self.harness = Harness(limits, num_pages=num_pages, page_size=page_size, depth=depth)
        self.scheduler = self.harness.scheduler
        self.accepted: list[Request] = []
        self.cut: set[str] = set()

    @rule(
        num_prompt=st.integers(0, 40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        min_tokens=st.integers(0, 5),
    )
    def add(
        self, num_prompt: int, max_tokens: int, priority: int, ignore_eos: bool,
        stops: list[int], min_tokens: int,
    ) -> None:  # fmt: skip
        request = make_request(
            f"r{len(self.accepted)}", num_prompt, max_tokens, priority=priority,
            ignore_eos=ignore_eos, stop_token_ids=stops, min_tokens=min(min_tokens, max_tokens),
        )  # fmt: skip
        never = num_prompt == 0 or num_prompt > self.harness.max_total - 1
        full = self.scheduler.num_waiting == 12
        if never or full:
            with pytest.raises(InvalidRequestError if never else QueueFullError):
                self.scheduler.add(request)
            return
        self.harness.add(request)
        self.accepted.append(request)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            was_running = self.scheduler.running
            plan = self.harness.step()
            self.check_fairness(was_running, plan)

    def check_fairness(self, was_running: tuple[Request, ...], plan: Plan) -> None:
        planned = [item.request for item in (*plan.decode, *plan.prefill)]
        if self.harness.depth == 0 and was_running:
            assert was_running[0] in planned, "the oldest request made no progress"
        assert not set(plan.preempted) & set(planned)
        newcomers = [request for request in planned if request not in was_running]
        place = {request: i for i, request in enumerate(self.accepted)}
        for request, other in itertools.product(newcomers, self.scheduler.waiting):
            assert (request.priority, place[request]) < (other.priority, place[other])

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), how=st.sampled_from(["abort", "finish", "preempt"]))
    def interfere(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.accepted))
        here = request in self.scheduler.running + self.scheduler.waiting
        running = request.status is Status.RUNNING
        if how == "preempt":
            got = self.scheduler.preempt(request.request_id)
            assert got is (request if running else None)
        elif how == "abort":
            got = self.scheduler.abort(request.request_id)
            assert got is (request if here else None)
        else:
            length = len(request.output_token_ids)
            index = data.draw(st.integers(0, length))
            kept = request.output_token_ids[:index] if here else list(request.output_token_ids)
            got = self.scheduler.finish(request.request_id, index)
            assert got is (request if here else None)
            assert request.output_token_ids == kept
        if how != "preempt" and here:
            self.cut.add(request.request_id)
            assert request.status is Status.FINISHED
        self.scheduler.check_integrity()

    @rule()
    def step_fails(self) -> None:
        """The pool's content is lost with everything in flight."""
        self.harness.schedule()
        self.scheduler.preempt_all()
        self.harness.in_flight.clear()
        self.harness.slots.clear()
        for request in self.accepted:
            self.harness.covered[request.request_id, request.num_preemptions] = 0
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.steps = 0
        self.harness.drain()
        bound = sum(
            (len(request.prompt_token_ids) + request.max_tokens) * (1 + request.num_preemptions)
            for request in self.accepted
        )
        assert self.harness.steps <= bound
        for request in self.accepted:
            output, reason = expected_output(request, self.harness.max_total)
            if request.request_id in self.cut:
                assert request.output_token_ids == output[: len(request.output_token_ids)]
                assert request.request_id not in self.harness.finished
            else:
                assert request.output_token_ids == output
                assert self.harness.finished[request.request_id] == (request, reason)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
