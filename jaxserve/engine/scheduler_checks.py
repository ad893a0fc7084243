"""The scheduler's invariants, as they are listed at the top of scheduler.py. For tests."""

from collections.abc import Mapping, Sequence

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.queue_entry import Entry, order_of
from jaxserve.engine.request import Status
from jaxserve.engine.siblings import Siblings
from jaxserve.engine.waiting_queue import WaitingQueue


def check_queues(
    entries: Mapping[str, Entry],
    waiting: WaitingQueue,
    running: Sequence[Entry],
    siblings: Siblings,
    manager: KVManager,
) -> None:
    """Raise AssertionError unless the invariants hold."""
    queued = [*waiting, *running]
    assert len(queued) == len(set(queued)) == len(entries), "a request is misplaced"
    for entry in queued:
        assert entries[entry.request.request_id] is entry, "a request is misplaced"
    waiting.check_integrity()
    assert list(running) == sorted(running, key=order_of), "the running are out of order"
    for entry in waiting:
        _check_waiting(entry)
    for entry in running:
        _check_running(entry, manager)
    assert siblings.members() == set(running), "siblings of the waiting are misplaced"
    manager.check_integrity(entry.request for entry in running)


def _check_waiting(entry: Entry) -> None:
    request = entry.request
    assert request.status is Status.WAITING, f"{request.status} among the waiting"
    assert not request.pages, "a waiting request owns pages"
    assert request.num_computed == entry.scheduled == entry.room == entry.growth == 0
    assert entry.length == request.num_tokens


def _check_running(entry: Entry, manager: KVManager) -> None:
    request = entry.request
    assert request.status is Status.RUNNING, f"{request.status} among the running"
    assert 0 <= request.num_computed <= entry.scheduled <= entry.length - 1
    assert request.num_computed <= request.num_tokens - 1
    assert request.num_tokens <= entry.length <= entry.longest
    assert len(request.pages) == manager.num_groups
    assert entry.room == min(map(len, request.pages)) * manager.page_size
    assert entry.room >= entry.scheduled, "a scheduled token has no page"
    if not entry.is_in_flight:
        most = manager.pages_for(request.num_tokens)
        assert max(map(len, request.pages)) <= most, "pages of drafts were not given back"
