"""A KV manager driven as a scheduler drives it, over a simulated pool whose contents are known.

What a model keeps for position p of a sequence depends on all its tokens up to p, its salt, its
adapter and the group; so a hash of these is what the simulated pool holds in a page's slot. A step
checks that each query finds exactly this for every position its window shows, whatever was shared,
copied, evicted, stored and loaded. Pages and slots that are free hold garbage.
"""

from collections import deque
from dataclasses import dataclass, field

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.plan import Transfers
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams

GARBAGE = -1
PAGE = 4  # tokens a page, in tests of single rules


@dataclass(eq=False)
class Run:
    """A running request: tokens in flight or done, and drawn tokens not committed yet."""

    request: Request
    scheduled: int
    draws: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.request.token_ids(0, self.request.num_tokens) + self.draws


def make_request(name: str, tokens: list[int], *, salt: str = "", adapter_id: int = 0) -> Request:
    request = Request(name, tuple(tokens), SamplingParams(), max_tokens=10_000, seed=0)
    request.cache_salt, request.adapter_id = salt, adapter_id
    return request


class KVSimulation:
    """Keywords are KVManager's. One step may be in flight while the next is planned."""

    def __init__(self, num_pages: int, page_size: int, windows: tuple[int | None, ...] = (None,),
                 *, max_chunk: int = 8, **settings: object) -> None:  # fmt: skip
        self.manager = KVManager(num_pages, page_size, windows, max_chunk=max_chunk, **settings)  # type: ignore[arg-type]
        self.pool = [[GARBAGE] * page_size for _ in range(num_pages)]
        self.host = [[GARBAGE] * page_size for _ in range(self.manager.host_pages)]
        self.running: list[Run] = []
        self.waiting: list[Request] = []
        self.in_flight: deque[list[tuple[Run, int, bool]]] = deque()
        self.planned: list[tuple[Run, int, bool]] = []
        self.newcomers: list[Run] = []

    # ------------------------------------------------------------------ a step

    def admit(self, request: Request, source: Run | None = None) -> Run | None:
        """None if there are too few pages."""
        manager = self.manager
        before = manager.num_free, manager.num_used, manager.stats
        matched = manager.match(request)
        assert manager.match(request) == matched <= request.num_tokens - 1
        assert before == (manager.num_free, manager.num_used, manager.stats)
        if not manager.admit(request, None if source is None else source.request):
            assert before == (manager.num_free, manager.num_used, manager.stats)
            assert not request.pages
            assert self.running, "a request that fits does not fit alone"
            return None
        assert matched <= request.num_computed <= request.num_tokens - 1
        assert source is not None or matched == request.num_computed
        run = Run(request, request.num_computed)
        self.running.append(run)
        self.newcomers.append(run)
        self.check()
        return run

    def plan(self, run: Run, size: int) -> bool:
        """Plan the next tokens of a request, at most `size`; False if there are too few pages."""
        size = min(size, self.manager.max_chunk, len(run.tokens) - run.scheduled)
        if size <= 0 or any(item[0] is run for item in self.planned):
            return True
        if not self.manager.grow(run.request, run.scheduled + size):
            assert len(self.running) > 1, "a request that fits cannot grow alone"
            return False
        held = sum(page > 0 for pages in run.request.pages for page in pages)
        assert held <= self.manager.pages_needed(max(run.request.num_tokens, run.scheduled + size))
        samples = run.scheduled + size == len(run.tokens)
        self.planned.append((run, size, samples))
        return True

    def dispatch(self) -> None:
        """Run what is planned: the transfers, then all writes, then all reads."""
        self.apply(self.manager.take_transfers())
        for run in self.newcomers:
            self.check_context(run, run.scheduled, 0)
        for run, size, _ in self.planned:
            self.write(run, run.scheduled, run.scheduled + size)
        for run, size, samples in self.planned:
            run.scheduled += size
            self.check_context(run, run.scheduled, size)
            if samples:
                run.draws.append((sum(run.tokens) + len(run.tokens)) % 3)
        self.in_flight.append(self.planned)
        self.planned, self.newcomers = [], []
        self.spoil_free()
        self.check()

    def commit(self) -> None:
        for run, size, samples in self.in_flight.popleft():
            if run not in self.running:
                continue
            run.request.num_computed += size
            if samples:
                run.request.output_token_ids.append(run.draws.pop(0))
            self.manager.commit(run.request)
        self.check()

    def run_to(self, run: Run, num_tokens: int) -> None:
        """Steps of this request alone, until it has num_tokens tokens, all but one computed."""
        while run.request.num_tokens < num_tokens or run.request.num_computed < num_tokens - 1:
            assert self.plan(run, self.manager.max_chunk)
            self.dispatch()
            self.commit()

    # ------------------------------------------------------------------ ends

    def end(self, run: Run, *, preempt: bool = False, discard: bool = False) -> list[int]:
        """A request ends or is preempted, whatever is in flight. Returns pages to be cleaned."""
        self.running.remove(run)
        self.planned = [item for item in self.planned if item[0] is not run]
        self.newcomers = [other for other in self.newcomers if other is not run]
        freed = []
        if discard:
            freed = self.manager.discard(run.request)
        else:
            self.manager.release(run.request)
        assert run.request.pages == ()
        if preempt:
            run.request.num_computed = 0
            run.request.num_preemptions += 1
            self.waiting.append(run.request)
        self.check()
        return freed

    def clear(self) -> None:
        """The pool's content is lost."""
        for run in list(self.running):
            self.end(run, preempt=True)
        self.in_flight.clear()
        self.manager.clear()
        for content in self.pool + self.host:
            content[:] = [GARBAGE] * len(content)
        self.check()

    # ------------------------------------------------------------------ the simulated memory

    def apply(self, transfers: Transfers) -> None:
        targets = [page for _, page in transfers.copies] + [page for _, page in transfers.loads]
        assert len(targets) == len(set(targets)), "a page is filled twice"
        assert 0 not in targets
        slots = [slot for _, slot in transfers.stores]
        assert len(slots) == len(set(slots)), "a slot is stored to twice"
        for page, slot in transfers.stores:
            self.host[slot][:] = self.pool[page]
        sources = [list(self.pool[page]) for page, _ in transfers.copies]
        for (_, page), content in zip(transfers.copies, sources, strict=True):
            self.pool[page][:] = content
        for slot, page in transfers.loads:
            self.pool[page][:] = self.host[slot]

    def contents(self, run: Run, group: int) -> list[int]:
        """What the pool must hold for each token of the request."""
        value = hash((group, run.request.cache_salt, run.request.adapter_id))
        contents = []
        for token in run.tokens:
            value = hash((value, token))
            contents.append(value)
        return contents

    def write(self, run: Run, start: int, stop: int) -> None:
        for group, pages in enumerate(run.request.pages):
            contents = self.contents(run, group)
            for position in range(start, stop):
                index, offset = divmod(position, self.manager.page_size)
                assert pages[index] > 0, "a write into a page that was given back"
                self.pool[pages[index]][offset] = contents[position]

    def check_context(self, run: Run, stop: int, num_queries: int) -> None:
        """What the queries at the last num_queries positions before `stop` see is there; with 0,
        what the query at `stop` will see."""
        size = self.manager.page_size
        for group, window in enumerate(self.manager.windows):
            first = 0 if window is None else max(0, stop - num_queries - window + 1)
            pages = run.request.pages[group]
            found = [self.pool[pages[i // size]][i % size] for i in range(first, stop)]
            assert found == self.contents(run, group)[first:stop], (
                f"{run.request.request_id}, group {group}, tokens {first} to {stop}"
            )

    def spoil_free(self) -> None:
        """Nobody may rely on what is free once the batch has run."""
        manager = self.manager
        assert not manager._cache.slots._pinned, "a slot is pinned after the batch that reads it"
        for page in manager._allocator._free:
            self.pool[page][:] = [GARBAGE] * manager.page_size
        for slot in manager._cache.slots._free:
            self.host[slot][:] = [GARBAGE] * manager.page_size

    def check(self) -> None:
        self.manager.check_integrity([run.request for run in self.running] + self.waiting)
        held = {page for run in self.running for pages in run.request.pages for page in pages}
        assert self.manager.num_used == len(held - {0})
        total = self.manager.num_pages - 1
        assert self.manager.num_free == total - self.manager.num_used


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def start(simulation: KVSimulation, name: str, ids: list[int], **options: object) -> Run:
    """Admit a request and run its prompt; one token is drawn."""
    source = options.pop("source", None)
    run = simulation.admit(make_request(name, ids, **options), source)  # type: ignore[arg-type]
    assert run is not None
    simulation.run_to(run, len(ids) + 1)
    return run


def finished(simulation: KVSimulation, name: str, ids: list[int], **options: object) -> Run:
    """Like `start`, and the request ends."""
    run = start(simulation, name, ids, **options)
    simulation.end(run)
    return run


def matched(simulation: KVSimulation, ids: list[int], **options: object) -> int:
    """How many tokens of such a prompt are cached."""
    return simulation.manager.match(make_request("probe", ids, **options))  # type: ignore[arg-type]
