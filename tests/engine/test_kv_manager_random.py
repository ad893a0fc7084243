"""Random operations on a KV manager over a simulated pool: every hit holds the right tokens."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.kv_simulation import KVSimulation, Run, make_request

WINDOWS: list[tuple[int | None, ...]] = [
    (None,), (None, None), (5,), (None, 3), (6, None, 6), (1, None), (4, 9)
]  # fmt: skip
BEGINNINGS = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 0, 0], [2] * 12, [1] * 30]


class ManagerMachine(RuleBasedStateMachine):
    """Submits, steps (one in flight), ends, preempts, forks, discards, loses the pool."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 5]),
        windows=st.sampled_from(WINDOWS),
        num_pages=st.integers(12, 60),
        host_pages=st.sampled_from([0, 1, 3, 20]),
        max_chunk=st.integers(1, 9),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def create(self, num_pages: int, page_size: int, windows: tuple[int | None, ...],
               **options: int) -> None:  # fmt: skip
        self.simulation = KVSimulation(num_pages, page_size, windows, **options)
        self.num_requests = 0

    @property
    def running(self) -> list[Run]:
        return self.simulation.running

    def a_run(self, data: st.DataObject) -> Run:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def submit_tokens(self, tokens: list[int], salt: str, adapter_id: int) -> None:
        if 0 < len(tokens) <= self.simulation.manager.capacity_tokens:
            self.num_requests += 1
            request = make_request(
                f"r{self.num_requests}", tokens, salt=salt, adapter_id=adapter_id
            )
            self.simulation.waiting.append(request)

    @precondition(lambda self: len(self.simulation.waiting) < 5)
    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        end=st.lists(st.integers(0, 2), max_size=8),
        cut=st.integers(0, 30),
        salt=st.sampled_from(["", "", "", "x"]),
        adapter_id=st.sampled_from([0, 0, 0, 1]),
    )
    def submit(self, beginning: list[int], end: list[int], cut: int, salt: str,
               adapter_id: int) -> None:  # fmt: skip
        self.submit_tokens(beginning[: len(beginning) - cut % 4] + end, salt, adapter_id)

    @precondition(lambda self: self.running and len(self.simulation.waiting) < 5)
    @rule(data=st.data(), cut=st.integers(0, 6), end=st.lists(st.integers(0, 2), max_size=3))
    def submit_follow_up(self, data: st.DataObject, cut: int, end: list[int]) -> None:
        """The next turn of a conversation, or a fork."""
        request = self.a_run(data).request
        tokens = request.token_ids(0, max(1, request.num_tokens - cut)) + end
        self.submit_tokens(tokens, request.cache_salt, request.adapter_id)

    @precondition(lambda self: len(self.simulation.in_flight) < 2)
    @rule(data=st.data(), num_admitted=st.integers(0, 3))
    def step(self, data: st.DataObject, num_admitted: int) -> None:
        simulation = self.simulation
        for run in list(self.running):
            size = data.draw(st.integers(0, 9))
            while run in self.running and not self.plan(run, size):
                victim = self.running[-1]  # never the oldest
                simulation.end(victim, preempt=True)
        for _ in range(num_admitted):
            if not simulation.waiting:
                break
            request = simulation.waiting.pop(0)
            source = self.a_run(data) if self.running and data.draw(st.booleans()) else None
            admitted = simulation.admit(request, source)
            if admitted is None:
                simulation.waiting.insert(0, request)
                break
            self.plan(admitted, data.draw(st.integers(0, 9)))
        simulation.dispatch()

    def plan(self, run: Run, size: int) -> bool:
        if run.scheduled + size > self.simulation.manager.capacity_tokens:
            return True
        return self.simulation.plan(run, size)

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def commit(self) -> None:
        self.simulation.commit()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def finish(self, data: st.DataObject, cut: int) -> None:
        """A request ends; a stop string may cut its output before its pages go."""
        run = self.a_run(data)
        if cut:
            del run.request.output_token_ids[-cut:]
        self.simulation.running.remove(run)
        self.simulation.running.append(run)
        self.simulation.end(run)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.simulation.end(self.a_run(data), preempt=True)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        run = self.a_run(data)
        freed = self.simulation.end(run, discard=True)
        assert len(freed) == len(set(freed))
        assert set(freed) <= set(self.simulation.manager._allocator._free)

    @rule(swap=st.booleans())
    def set_swap(self, swap: bool) -> None:
        self.simulation.manager.swap_is_cheaper = swap

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 0:
            self.simulation.clear()
            assert self.simulation.manager.num_free == self.simulation.manager.num_pages - 1

    def teardown(self) -> None:
        for run in list((getattr(self, "simulation", None) and self.running) or ()):
            self.simulation.end(run)
        if hasattr(self, "simulation"):
            assert self.simulation.manager.num_used == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.slow
class TestManagerMachineLong(ManagerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=600, stateful_step_count=100, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
