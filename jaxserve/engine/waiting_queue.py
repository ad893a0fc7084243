"""Who of the waiting requests enters next.

Policies, each with the request that came first in front among equals:
- "fcfs": the one that came first;
- "priority": the one with the lowest `priority`;
- "prefix": the one with the most tokens cached, looked for among the PREFIX_WINDOW that came first;
  a preempted request goes before those that have not run yet.

Ageing, under every policy: when MAX_OVERTAKES requests in a row have entered while one that came
before each of them was waiting, the one that has waited longest is next. It moves to the front of
the order for good, also among the running, so that nobody of a better rank takes its pages away.
So of MAX_OVERTAKES + 1 requests that enter, at least one is the one that waited longest; a request
with `a` older ones before it enters as number (a + 1) * (MAX_OVERTAKES + 1) at the latest, and
nobody starves. A bound on how often each single request is overtaken would not do: behind a long
queue of low priority it would make every policy fcfs.

A request that waits for its sibling (see siblings.py) is passed over meanwhile: it neither blocks
nor is overtaken.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from jaxserve.engine.queue_entry import FIRST_RANK, Entry, age_of, order_of
from jaxserve.engine.request import Request

MAX_OVERTAKES = 16
PREFIX_WINDOW = 64


class WaitingQueue:
    """The waiting requests in order.

    match: tokens of a request that are cached. is_held: whether an entry waits for its sibling.
    """

    def __init__(
        self, policy: str, match: Callable[[Request], int], is_held: Callable[[Entry], bool]
    ) -> None:
        if policy not in ("fcfs", "priority", "prefix"):
            raise ValueError(f"policy is {policy!r}; choose fcfs, priority or prefix")
        self._policy = policy
        self._match = match
        self._is_held = is_held
        self._by_order: list[Entry] = []
        self._by_age: list[Entry] = []
        self._overtakes = 0  # entered since the one that had waited longest did

    def __len__(self) -> int:
        return len(self._by_order)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_order)

    def rank(self, request: Request) -> float:
        """First part of the order of a request that is new."""
        return request.priority if self._policy == "priority" else 0

    def add(self, entry: Entry) -> None:
        insort(self._by_order, entry, key=order_of)
        insort(self._by_age, entry, key=age_of)

    def remove(self, entry: Entry) -> None:
        """It ended; nobody was overtaken."""
        _remove(self._by_order, entry, order_of)
        _remove(self._by_age, entry, age_of)

    def next(self) -> Entry | None:
        """The request whose turn it is; None if nobody may enter."""
        if self._overtakes >= MAX_OVERTAKES:
            oldest = self._oldest()
            if oldest is not None:
                self._put_first(oldest)
        allowed = (entry for entry in self._by_order if not self._is_held(entry))
        if self._policy == "prefix":
            return min(islice(allowed, PREFIX_WINDOW), key=self._prefix_order, default=None)
        return next(allowed, None)

    def enter(self, entry: Entry) -> None:
        """Take out a request that starts to run."""
        self._overtakes = 0 if entry is self._oldest() else self._overtakes + 1
        self.remove(entry)

    def _oldest(self) -> Entry | None:
        return next((entry for entry in self._by_age if not self._is_held(entry)), None)

    def _put_first(self, entry: Entry) -> None:
        if entry.order[0] != FIRST_RANK:
            _remove(self._by_order, entry, order_of)
            entry.order = (FIRST_RANK, *entry.age)
            insort(self._by_order, entry, key=order_of)

    def _prefix_order(self, entry: Entry) -> tuple[float, bool, int, float, int]:
        request = entry.request
        return entry.order[0], not request.num_preemptions, -self._match(request), *entry.age

    def check_integrity(self) -> None:
        """Raise AssertionError unless both orders hold and have the same entries."""
        assert self._by_order == sorted(self._by_order, key=order_of), "the queue is out of order"
        assert self._by_age == sorted(self._by_order, key=age_of), "the ages are out of order"


def _remove(queue: list[Entry], entry: Entry, key: Callable[[Entry], tuple]) -> None:
    index = bisect_left(queue, key(entry), key=key)
    assert queue[index] is entry, "a request is not in the queue its status names"
    del queue[index]
