"""Random traffic on small pools: invariants, fairness, bounded ends, outputs that do not depend on
how they were scheduled."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.engine.plan import Limits, Plan
from jaxserve.engine.request import Request, Status
from jaxserve.errors import InvalidRequestError, QueueFullError
from tests.support.scheduler_harness import VOCAB, Harness, expected_output, make_request


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
        assert not (plan.preempted and newcomers)
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
        self.harness.lose_pool()

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
