"""Random operations on a KV simulation. Whoever drives them makes the choices."""

from collections.abc import Callable

from tests.support.kv_simulation import KVSimulation, Run, make_request

WINDOWS: list[tuple[int | None, ...]] = [
    (None,), (None, None), (5,), (None, 3), (6, None, 6), (1, None), (4, 9)
]  # fmt: skip
BEGINNINGS = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 0, 0], [2] * 12, [1] * 30]
MOST_WAITING = 5


class KVOperations:
    """Submits, steps (one in flight), ends, preempts, forks, discards, loses the pool.

    choose(n): a number below n. settings: KVSimulation's.
    """

    def __init__(self, choose: Callable[[int], int], **settings: object) -> None:
        self.choose = choose
        self.simulation = KVSimulation(**settings)  # type: ignore[arg-type]
        self.num_requests = 0

    @property
    def running(self) -> list[Run]:
        return self.simulation.running

    def any_run(self) -> Run:
        return self.running[self.choose(len(self.running))]

    def _submit(self, tokens: list[int], salt: str, adapter_id: int) -> None:
        capacity = self.simulation.manager.capacity_tokens
        if 0 < len(tokens) <= capacity and len(self.simulation.waiting) < MOST_WAITING:
            self.num_requests += 1
            name = f"r{self.num_requests}"
            request = make_request(name, tokens, salt=salt, adapter_id=adapter_id)
            self.simulation.waiting.append(request)

    def submit(self) -> None:
        """A prompt that begins like others, now and then under another salt or adapter."""
        beginning = BEGINNINGS[self.choose(len(BEGINNINGS))]
        tokens = beginning[: len(beginning) - self.choose(4)]
        tokens += [self.choose(3) for _ in range(self.choose(8))]
        self._submit(tokens, "x" * (self.choose(5) == 0), int(self.choose(5) == 0))

    def submit_follow_up(self) -> None:
        """The next turn of a conversation, or a fork."""
        if self.running:
            request = self.any_run().request
            tokens = request.token_ids(0, max(1, request.num_tokens - self.choose(7)))
            tokens += [self.choose(3) for _ in range(self.choose(3))]
            self._submit(tokens, request.cache_salt, request.adapter_id)

    def step(self) -> None:
        """Plan a step and run it; what was admitted may be sent back before it runs."""
        simulation = self.simulation
        if len(simulation.in_flight) == 2:
            return
        for run in list(self.running):
            while run in self.running and not self._plan(run):
                simulation.end(self.running[-1], preempt=True)  # never the oldest
        for _ in range(self.choose(4)):
            if not simulation.waiting:
                break
            request = simulation.waiting.pop(0)
            source = self.any_run() if self.running and self.choose(2) else None
            admitted = simulation.admit(request, source)
            if admitted is None:
                simulation.waiting.insert(0, request)
                break
            self._plan(admitted)
            if self.choose(4) == 0:
                simulation.end(self.any_run(), preempt=True)
        simulation.dispatch()

    def _plan(self, run: Run) -> bool:
        size = self.choose(10)
        if run.scheduled + size > self.simulation.manager.capacity_tokens:
            return True
        return self.simulation.plan(run, size)

    def commit(self) -> None:
        if self.simulation.in_flight:
            self.simulation.commit()

    def finish(self) -> None:
        """A request ends; a stop string may cut its output before its pages go."""
        if self.running:
            run = self.any_run()
            cut = self.choose(3)
            if cut:
                del run.request.output_token_ids[-cut:]
            self.simulation.end(run)

    def preempt(self) -> None:
        if self.running:
            self.simulation.end(self.any_run(), preempt=True)

    def discard(self) -> None:
        if self.running:
            freed = self.simulation.end(self.any_run(), discard=True)
            assert len(freed) == len(set(freed))
            assert set(freed) <= set(self.simulation.manager._allocator._free)

    def swap(self) -> None:
        self.simulation.manager.swap_is_cheaper = self.choose(4) > 0

    def clear(self) -> None:
        if self.choose(10) == 0:
            self.simulation.clear()
            assert self.simulation.manager.num_free == self.simulation.manager.num_pages - 1

    def end_all(self) -> None:
        for run in list(self.running):
            self.simulation.end(run)
        assert self.simulation.manager.num_used == 0
