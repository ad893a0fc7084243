"""Random traffic on small pools: invariants, fairness, bounded ends, outputs that do not depend on
how they were scheduled. The long version makes 10,000 operations in all."""

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.engine import waiting_queue
from jaxserve.engine.plan import Limits, Plan
from jaxserve.engine.request import Request, Status
from jaxserve.engine.step_times import StepTimes
from jaxserve.errors import InvalidRequestError, QueueFullError
from tests.support.scheduler_harness import (
    VOCAB,
    Harness,
    expected_output,
    make_request,
    next_token,
)

MAX_QUEUE = 12
MAX_OVERTAKES = 3  # few, so that ageing happens
STEMS = [make_request(f"stem{i}", 24).prompt_token_ids for i in range(3)]


def some_right_some_wrong(context: list[int]) -> list[int]:
    """Up to five drafts, of which the first ones are right; often none, often all."""
    right = zlib.crc32(b"right" + bytes(context)) % 5
    wrong = zlib.crc32(b"wrong" + bytes(context)) % 3
    drafts: list[int] = []
    for _ in range(right):
        drafts.append(next_token(context + drafts))
    return drafts + [(next_token(context + drafts) + 1) % VOCAB] * wrong


class SchedulerMachine(RuleBasedStateMachine):
    """The harness checks the invariants after every call, and every token that a query sees."""

    done: ClassVar[Counter[str]] = Counter()  # operations of all runs

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.integers(1, 5),
        windows=st.sampled_from([(None,), (None,), (7,), (3, None), (2, 9, None), (6, 6)]),
        prefix_cache=st.booleans(),
        host_pages=st.sampled_from([0, 2, 12, 12]),
        depth=st.integers(0, 1),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
        policy=st.sampled_from(["fcfs", "priority", "prefix"]),
        limits=st.builds(
            Limits,
            max_batch_rows=st.integers(1, 5),
            max_batch_tokens=st.integers(1, 24),
            max_prefill_rows=st.integers(1, 3),
            max_model_len=st.integers(2, 60),
            max_queue=st.just(MAX_QUEUE),
            max_chunk=st.sampled_from([None, 1, 3]),
            prefill_sizes=st.sampled_from([(), (4, 8, 24)]),
            max_burst=st.sampled_from([1, 2, 8]),
        ),
        measured=st.sampled_from([True, True, False]),
        drafts=st.booleans(),
    )
    def create(
        self, num_pages: int, page_size: int, windows: tuple[int | None, ...], prefix_cache: bool,
        host_pages: int, depth: int, batching: str, policy: str, limits: Limits,
        measured: bool, drafts: bool,
    ) -> None:  # fmt: skip
        tokens = limits.max_batch_tokens
        sizes = tuple(sorted({min(size, tokens) for size in limits.prefill_sizes}))
        self.times = StepTimes()
        if measured:  # else there are bursts only after steps that `observe` makes up
            self.times.observe(1, 0, 0.001)
        self.harness = Harness(
            replace(limits, prefill_sizes=sizes, policy=policy, batching=batching,
                    max_burst=min(limits.max_burst, limits.max_chunk or tokens)),
            num_pages=1 + (num_pages - 1) * len(windows), page_size=page_size, windows=windows,
            prefix_cache=prefix_cache, host_pages=host_pages, step_times=self.times, depth=depth,
            guess=some_right_some_wrong if drafts and not depth else None,
        )  # fmt: skip
        self.scheduler = self.harness.scheduler
        self.accepted: list[Request] = []
        self.cut: set[Request] = set()
        self.now = 0.0
        self.num_empty = 0
        self.num_steps = 0  # since the pool was lost
        self.patch = patch.object(waiting_queue, "MAX_OVERTAKES", MAX_OVERTAKES)
        self.patch.start()

    # ------------------------------------------------------------------ requests

    @rule(
        num_prompt=st.integers(0, 40),
        stem=st.sampled_from(STEMS),
        num_stem=st.integers(0, 24),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        min_tokens=st.integers(0, 5),
        wait=st.sampled_from([None, None, None, 3, 30]),
        siblings=st.sampled_from([0, 0, 0, 2]),
    )
    def submit(
        self, num_prompt: int, stem: tuple[int, ...], num_stem: int, max_tokens: int,
        priority: int, ignore_eos: bool, stops: list[int], min_tokens: int, wait: int | None,
        siblings: int,
    ) -> None:  # fmt: skip
        num_stem = min(num_stem, num_prompt)
        request = make_request(
            f"r{len(self.accepted)}", num_prompt - num_stem, max_tokens, priority=priority,
            stem=stem[:num_stem], ignore_eos=ignore_eos, stop_token_ids=stops,
            min_tokens=min(min_tokens, max_tokens),
        )  # fmt: skip
        request.deadline = None if wait is None else self.now + wait
        self.add(request)
        for i in range(siblings if request in self.accepted else 0):
            leader = request.request_id
            self.add(copy_of(request, f"{leader}-{i}", leader_id=leader, output_token_ids=[]))

    @property
    def is_full(self) -> bool:
        """Whether nobody more is taken in: those who wait beside as many as the rows can take."""
        num_open = self.scheduler.num_waiting + self.scheduler.num_running
        return num_open >= MAX_QUEUE + self.scheduler.limits.max_batch_rows

    def add(self, request: Request) -> None:
        self.done["submit"] += 1
        num_prompt = len(request.prompt_token_ids)
        never = num_prompt == 0 or num_prompt > self.harness.max_total - 1
        if never or self.is_full:
            with pytest.raises(InvalidRequestError if never else QueueFullError):
                self.scheduler.add(request)
            return
        self.harness.add(request)
        self.accepted.append(request)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), more=st.integers(0, 9))
    def fork(self, data: st.DataObject, more: int) -> None:
        self.done["fork"] += 1
        parent = data.draw(st.sampled_from(self.accepted))
        ended = parent.status is Status.FINISHED
        child = copy_of(
            parent, f"f{len(self.accepted)}", output_token_ids=list(parent.output_token_ids),
            max_tokens=parent.max_tokens + more,
        )  # fmt: skip
        if ended or self.is_full:
            with pytest.raises(InvalidRequestError if ended else QueueFullError):
                self.scheduler.fork(parent.request_id, child)
        else:
            self.scheduler.fork(parent.request_id, child)
            self.accepted.append(child)
        self.scheduler.check_integrity()

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), how=st.sampled_from(["abort", "finish", "preempt", "discard"]))
    def interfere(self, data: st.DataObject, how: str) -> None:
        self.done[how] += 1
        request = data.draw(st.sampled_from(self.accepted))
        here = request in self.scheduler.running + self.scheduler.waiting
        if how == "preempt":
            running = request.status is Status.RUNNING
            assert self.scheduler.preempt(request.request_id) is (request if running else None)
        elif how == "abort":
            assert self.scheduler.abort(request.request_id) is (request if here else None)
        elif how == "discard":
            pages = self.scheduler.discard(request.request_id)
            held = {p for other in self.scheduler.running for group in other.pages for p in group}
            assert not held & set(pages)
        else:
            index = data.draw(st.integers(0, len(request.output_token_ids)))
            kept = request.output_token_ids[: index if here else None]
            got = self.scheduler.finish(request.request_id, index)
            assert got is (request if here else None)
            assert request.output_token_ids == kept
        if how != "preempt" and here:
            self.cut.add(request)
            assert request.status is Status.FINISHED
            assert request.pages == ()
        self.scheduler.check_integrity()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(seconds=st.integers(0, 12))
    def expire(self, seconds: int) -> None:
        self.done["expire"] += 1
        self.now += seconds
        due = {
            request
            for request in (*self.scheduler.running, *self.scheduler.waiting)
            if request.deadline is not None and request.deadline <= self.now
        }
        expired = self.scheduler.expire(self.now)
        assert set(expired) == due
        assert len(expired) == len(due)
        assert all(request.status is Status.FINISHED for request in expired)
        self.cut |= due
        self.scheduler.check_integrity()

    # ------------------------------------------------------------------ steps

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 16))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.done["step"] += 1
            self.num_steps += 1
            was_running = self.scheduler.running
            plan = self.harness.step()
            self.done["burst"] += plan.steps > 1
            self.done["drafts"] += plan.width > 1
            self.check_fairness(was_running, plan)
            self.num_empty = self.num_empty + 1 if plan.is_empty else 0
            if not self.scheduler.has_work:
                return
            assert self.num_empty < 4, "nothing was scheduled for four steps"

    def check_fairness(self, was_running: tuple[Request, ...], plan: Plan) -> None:
        planned = [item.request for item in (*plan.decode, *plan.prefill)]
        if self.harness.depth == 0 and was_running:
            assert was_running[0] in planned, "the oldest request made no progress"
        if was_running:
            assert was_running[0] not in plan.preempted
        assert not set(plan.preempted) & set(planned)
        newcomers = [request for request in planned if request not in was_running]
        assert not (plan.preempted and newcomers)
        if was_running and self.scheduler.limits.batching == "static":
            assert len(newcomers) <= self.scheduler.limits.max_batch_rows - len(was_running)

    @rule(
        num_decode=st.integers(0, 5),
        num_prefill=st.integers(0, 24),
        seconds=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    )
    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        self.times.observe(num_decode, num_prefill, seconds)
        self.times.observe_copy(num_prefill, seconds)

    @precondition(lambda self: self.num_steps >= 8)
    @rule()
    def step_fails(self) -> None:
        """The pool's content is lost with everything in flight."""
        self.done["fail"] += 1
        self.num_steps = 0
        self.harness.schedule()
        self.harness.lose_pool()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.steps = 0
        self.harness.drain()
        self.patch.stop()
        self.done["evict"] += self.harness.manager.stats.evicted_pages
        self.done["hit"] += self.harness.manager.stats.hit_tokens
        self.done["load"] += self.harness.manager.stats.loaded_pages
        bound = sum(
            (len(request.prompt_token_ids) + request.max_tokens) * (1 + request.num_preemptions)
            for request in self.accepted
        )
        assert self.harness.steps <= bound
        for request in self.accepted:
            output, reason = expected_output(request, self.harness.max_total)
            if request in self.cut:
                assert request.output_token_ids == output[: len(request.output_token_ids)]
                assert request.request_id not in self.harness.finished
            else:
                assert request.output_token_ids == output
                assert self.harness.finished[request.request_id] == (request, reason)


def copy_of(request: Request, request_id: str, **changes: object) -> Request:
    return replace(
        request, request_id=request_id, pages=(), num_computed=0, num_preemptions=0,
        page_hashes=[], **changes,
    )  # type: ignore[arg-type]  # fmt: skip


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def done() -> Iterator[Counter[str]]:
    SchedulerMachine.done.clear()
    yield SchedulerMachine.done
    SchedulerMachine.done.clear()


@pytest.mark.slow
def test_ten_thousand_random_operations(done: Counter[str]):
    kinds = ("submit", "step", "abort", "finish", "preempt", "fork", "expire", "discard", "fail")
    for _ in range(30):
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=100, stateful_step_count=50, deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
        rare = min(done[kind] for kind in (*kinds, "evict", "hit", "load", "burst", "drafts"))
        if sum(done[kind] for kind in kinds) >= 10_000 and rare >= 50:
            return
    pytest.fail(f"too little was tried: {done}")
