"""Where every request is, and its moves from one place to the other, with its pages.

    add -> waiting -> enter -> running -> end
              ^                   |
              +----- preempt -----+            a waiting request may end too

A move is made whole: the queues, the siblings, the status and the pages change together.

Invariants, after every call (scheduler_checks.py):
- a request is in exactly one place: waiting, running, or gone (FINISHED, no pages);
- both queues are in order;
- a waiting request owns no pages and has nothing computed or in flight;
- pages are held by exactly the requests that list them (kv_manager.py), and the lists of a running
  request cover every scheduled token in every group, and no page more than its tokens need while
  nothing of it is in flight;
- 0 <= num_computed <= scheduled <= tokens known or in flight - 1;
- the siblings that others wait for are exactly the running ones.
"""

from bisect import bisect_left, insort

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.queue_entry import Entry, order_of
from jaxserve.engine.request import Request, Status
from jaxserve.engine.scheduler_checks import check_queues
from jaxserve.engine.siblings import Siblings, shared
from jaxserve.engine.waiting_queue import WaitingQueue


class RequestQueues:
    """The waiting and the running requests over one KV manager."""

    def __init__(self, policy: str, manager: KVManager) -> None:
        self.siblings = Siblings()
        self.waiting = WaitingQueue(policy, manager.match, self.siblings.holds)
        self.running: list[Entry] = []  # in order
        self._entries: dict[str, Entry] = {}
        self.get = self._entries.get  # by request id; None if it is in no queue
        self._manager = manager
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, family: str, longest: int) -> None:
        """A new request waits. longest: tokens at which it ends."""
        order = (self.waiting.rank(request), request.arrival_time, self._num_added)
        self._num_added += 1
        entry = Entry(request, order, family, longest, request.num_tokens)
        self._entries[request.request_id] = entry
        request.status = Status.WAITING
        self.waiting.add(entry)

    def num_to_compute(self, entry: Entry) -> int:
        """Tokens that a waiting request would have to run before it draws one."""
        source = self.siblings.source(entry)
        given = 0 if source is None else shared(entry.request, source)
        return entry.length - max(given, self._manager.match(entry.request))

    def enter(self, entry: Entry) -> bool:
        """A waiting request gets its pages and runs; False if there are too few, with those that
        the running may need next."""
        request = entry.request
        leave = sum(other.growth for other in self.running)
        if not self._manager.admit(request, self.siblings.source(entry), leave=leave):
            return False
        self.waiting.enter(entry)
        insort(self.running, entry, key=order_of)
        self.siblings.add(entry)
        request.status = Status.RUNNING
        entry.scheduled = request.num_computed
        self.note_room(entry)
        return True

    def preempt(self, entry: Entry) -> None:
        """A running request waits again in its old place; its output is kept."""
        request = entry.request
        self._leave_running(entry)
        self._manager.release(request)
        entry.reset()
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.waiting.add(entry)

    def end(self, entry: Entry) -> None:
        """A request is over, wherever it is."""
        request = entry.request
        if request.status is Status.RUNNING:
            self._leave_running(entry)
        else:
            self.waiting.remove(entry)
        del self._entries[request.request_id]
        self._manager.release(request)
        request.status = Status.FINISHED

    def trim(self, entry: Entry) -> None:
        """A running request gives back whole pages behind what is computed or in flight: those of
        drafts that did not hold, or did not run."""
        if entry.room - entry.scheduled >= self._manager.page_size:
            self._manager.shrink(entry.request, entry.scheduled)
            self.note_room(entry)

    def note_room(self, entry: Entry) -> None:
        """A running request's page lists have changed: what they cover, what it may need soon."""
        manager, pages = self._manager, entry.request.pages
        entry.room = min(map(len, pages)) * manager.page_size
        entry.growth = manager.num_groups if entry.longest - 1 > entry.room else 0
        if entry.room < entry.length:  # a windowed group takes its pages chunk by chunk
            held = sum(page > 0 for group in pages for page in group)
            missing = sum(manager.pages_for(entry.length) - len(group) for group in pages)
            entry.growth += max(0, min(missing, manager.pages_needed(entry.length) - held))

    def _leave_running(self, entry: Entry) -> None:
        index = bisect_left(self.running, entry.order, key=order_of)
        assert self.running[index] is entry, "a request is not in the queue its status names"
        del self.running[index]
        self.siblings.remove(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        check_queues(self._entries, self.waiting, self.running, self.siblings, self._manager)
