"""Who is next: the policies, and how long anybody can be overtaken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine import waiting_queue
from jaxserve.engine.queue_entry import Entry
from jaxserve.engine.waiting_queue import MAX_OVERTAKES, PREFIX_WINDOW, WaitingQueue
from tests.support.scheduler_harness import make_request


class Queue:
    """A waiting queue with given hits, and entries that are held."""

    def __init__(self, policy: str) -> None:
        self.hits: dict[str, int] = {}
        self.held: set[Entry] = set()
        self.num_added = 0
        self.queue = WaitingQueue(
            policy, lambda request: self.hits.get(request.request_id, 0), self.held.__contains__
        )

    def add(self, name: str, *, priority: int = 0, arrival: float = 0.0, hit: int = 0) -> Entry:
        request = make_request(name, 3, priority=priority)
        request.arrival_time = arrival
        order = (self.queue.rank(request), arrival, self.num_added)
        entry = Entry(request, order, name, longest=8, length=3)
        self.num_added += 1
        self.hits[name] = hit
        self.queue.add(entry)
        self.queue.check_integrity()
        return entry

    def enter(self) -> Entry | None:
        entry = self.queue.next()
        if entry is not None:
            self.queue.enter(entry)
            self.queue.check_integrity()
        return entry

    def enter_all(self) -> list[str]:
        return [entry.request.request_id for entry in iter(self.enter, None)]


def filled(policy: str) -> Queue:
    queue = Queue(policy)
    queue.add("a", priority=1, arrival=1.0, hit=0)
    queue.add("b", priority=0, arrival=3.0, hit=20)
    queue.add("c", priority=-1, arrival=2.0, hit=10)
    queue.add("d", priority=0, arrival=2.0, hit=20)
    return queue


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "acdb"), ("priority", "cdba"), ("prefix", "dbca")]
)
def test_policies(policy: str, order: str):
    assert filled(policy).enter_all() == list(order)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'lifo'; choose fcfs, priority or prefix"):
        Queue("lifo")


def test_prefix_looks_at_the_first_few_and_lets_the_preempted_go_first():
    queue = Queue("prefix")
    for i in range(PREFIX_WINDOW):
        queue.add(f"{i}")
    queue.add("far", hit=100)
    queue.hits["7"] = 1
    queue.add("preempted", arrival=-1.0).request.num_preemptions = 1
    names = [queue.enter().request.request_id for _ in range(3)]  # type: ignore[union-attr]
    assert names == ["preempted", "7", "far"]


def test_the_oldest_is_next_after_so_many_overtakes_and_stays_in_front():
    queue = Queue("priority")
    old = queue.add("old", priority=5)
    older = queue.add("second", priority=5)
    entered = []
    for i in range(2 * MAX_OVERTAKES + 2):
        queue.add(f"urgent{i}")
        entered.append(queue.enter())
    assert entered.index(old) == MAX_OVERTAKES
    assert entered.index(older) == 2 * MAX_OVERTAKES + 1
    queue.queue.add(old)  # preempted: nobody of a better rank is before it now
    queue.add("most urgent", priority=-9)
    assert queue.enter() is old


def test_who_waits_for_a_sibling_neither_blocks_nor_is_overtaken():
    queue = Queue("priority")
    held = queue.add("held", priority=5)
    other = queue.add("other", priority=5)
    queue.held.add(held)
    for i in range(MAX_OVERTAKES):
        queue.add(f"urgent{i}")
        assert queue.enter() is not other
    assert queue.enter() is other
    assert queue.enter() is None
    queue.held.clear()
    assert queue.enter() is held


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2), st.integers(0, 9)),
        st.tuples(st.just("enter"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("hit"), st.integers(0, 50), st.integers(0, 9)),
    ),
    min_size=40,
    max_size=200,
)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
@given(operations=operations)
@settings(max_examples=60, deadline=None)
def test_nobody_starves(policy: str, operations: list[tuple[str, int, int]]):
    """At most `most` requests in a row enter while one older than them waits; a request with `a`
    older ones before it is at the latest number (a + 1) * (most + 1) to enter."""
    most = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_queue, "MAX_OVERTAKES", most)
        queue = Queue(policy)
        latest: dict[Entry, int] = {}  # insertion order is age
        num_entered = streak = 0
        for kind, value, hit in operations:
            if kind == "add":
                entry = queue.add(f"{queue.num_added}", priority=value, hit=hit)
                latest[entry] = num_entered + (len(latest) + 1) * (most + 1)
            elif kind == "end" and latest:
                entry = list(latest)[value % len(latest)]
                queue.queue.remove(entry)
                del latest[entry]
            elif kind == "hit" and latest:
                entry = list(latest)[value % len(latest)]
                queue.hits[entry.request.request_id] = hit
            elif kind == "enter":
                for _ in range(min(value, len(latest))):
                    oldest = next(iter(latest))
                    entered = queue.enter()
                    assert entered is not None
                    num_entered += 1
                    streak = 0 if entered is oldest else streak + 1
                    assert streak <= most
                    assert num_entered <= latest.pop(entered)
                    if policy == "fcfs":
                        assert entered is oldest
        assert all(num_entered < bound for bound in latest.values())
