"""Which requests have run out of time: a heap, so that looking costs nothing while nobody has."""

from heapq import heapify, heappop, heappush

from jaxserve.engine.request import Request, Status

_MIN_COMPACT = 64


class Deadlines:
    """Deadlines of the requests that have one. Ended requests are dropped by and by."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._compact_at = _MIN_COMPACT

    def __len__(self) -> int:
        """Deadlines kept, those of ended requests included."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request until it ends."""
        if request.deadline is None:
            return
        heappush(self._heap, (request.deadline, self._num_added, request))
        self._num_added += 1
        if len(self._heap) >= self._compact_at:
            self._heap = [item for item in self._heap if item[2].status is not Status.FINISHED]
            heapify(self._heap)
            self._compact_at = max(_MIN_COMPACT, 2 * len(self._heap))

    def pop_expired(self, now: float) -> list[Request]:
        """The requests that have not ended and whose deadline is `now` or earlier."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request.status is not Status.FINISHED:
                expired.append(request)
        return expired
