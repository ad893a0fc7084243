"""What goes first when pages are needed, where it goes, and how it comes back."""

import pytest

from jaxserve.engine.host_slots import HostSlots
from jaxserve.engine.page_moves import NO_SLOT, Origin, PageMoves
from jaxserve.engine.page_tree import CHILDREN_LOOKED_AT, Node
from tests.support.kv_simulation import KVSimulation, finished, make_request, matched, start, tokens


def fill(simulation: KVSimulation, num_tokens: int, first: int = 500) -> None:
    """Take pages for a prompt that nobody shares, and let them go unseen."""
    run = simulation.admit(make_request("filler", tokens(num_tokens, first)))
    assert run is not None
    simulation.dispatch()
    simulation.end(run, discard=True)


def evict_all(simulation: KVSimulation) -> None:
    """Small requests take every page that can be had, and leave nothing behind."""
    runs = []
    while simulation.manager.num_free >= simulation.manager.num_groups:
        run = simulation.admit(make_request("filler", [900 + len(runs)] * 4))
        assert run is not None
        runs.append(run)
    simulation.dispatch()
    for run in runs:
        simulation.end(run, discard=True)


# ---------------------------------------------------------------------- order of eviction


def test_leaves_go_first():
    simulation = KVSimulation(9, 4)  # 8 pages
    finished(simulation, "a", tokens(16))
    for left in (3, 2, 1):
        fill(simulation, (8 - left) * 4)
        assert matched(simulation, tokens(17)) == left * 4
    assert simulation.manager.stats.evicted_pages == 3


def test_least_recently_used_goes_first():
    simulation = KVSimulation(9, 4)
    finished(simulation, "a", tokens(8))
    finished(simulation, "b", tokens(8, 100))
    finished(simulation, "a again", tokens(9))
    fill(simulation, 24)
    assert matched(simulation, tokens(9)) == 8
    assert matched(simulation, tokens(9, 100)) == 0


def test_a_copied_page_counts_as_used():
    simulation = KVSimulation(9, 4)
    finished(simulation, "a", tokens(3))
    finished(simulation, "b", tokens(3, 100))
    finished(simulation, "c", [0, 1, 2, 50])  # copies a's page
    fill(simulation, 24)
    assert matched(simulation, [0, 1, 2, 60]) == 3
    assert matched(simulation, [100, 101, 102, 60]) == 0


def test_a_common_beginning_outlives_its_ends():
    simulation = KVSimulation(21, 4)
    for end in range(4):
        finished(simulation, f"r{end}", [*tokens(8), *[100 + end] * 12])
    fill(simulation, 18 * 4)
    assert matched(simulation, tokens(9)) == 8


def test_pages_in_use_are_not_evicted():
    simulation = KVSimulation(9, 4)
    run = start(simulation, "a", tokens(16))
    assert simulation.admit(make_request("b", tokens(17, 100))) is None
    assert simulation.admit(make_request("c", tokens(16, 100))) is not None
    simulation.run_to(run, 18 - 1)
    assert matched(simulation, tokens(17)) == 16


def test_inner_pages_of_a_windowed_group_go_alone():
    """They were given back long before the end, and the beginning is still good without them."""
    simulation = KVSimulation(26, 4, (None, 5))
    run = finished(simulation, "a", tokens(40))  # 10 pages of the global group, 10 of the other
    follow_up = [*tokens(40), 77]
    assert run.request.num_computed == 40
    assert simulation.manager.stats.cached_pages == 20
    assert matched(simulation, [*tokens(16), 77]) == 16
    fill(simulation, 16)  # 4 pages in one group, 2 in the other: one page is evicted
    assert matched(simulation, [*tokens(4), 77]) == 0
    fill(simulation, 32)  # 8 and 4
    assert matched(simulation, [*tokens(16), 77]) == 0
    assert matched(simulation, follow_up) == 40


def test_a_hit_must_hold_in_all_groups():
    """The window of the longest candidate is gone, so a shorter hit is used."""
    simulation = KVSimulation(60, 4, (None, 5))
    finished(simulation, "a", tokens(40))
    cache = simulation.manager._cache
    probe = make_request("probe", [*tokens(40), 77])
    path = cache.tree.path(probe, 10)
    cache._detach(path[8], 1)  # tokens 32 to 35; the query at 40 sees 36 to 40
    assert simulation.manager.match(probe) == 40
    cache._detach(path[9], 1)
    assert simulation.manager.match(probe) == 32
    cache._detach(path[7], 1)
    # The query at position 28 sees 24 to 28: pages 6 and on.
    assert simulation.manager.match(probe) == 28
    simulation.check()


def test_a_bounded_number_of_children_is_looked_at():
    simulation = KVSimulation(60, 4)
    finished(simulation, "a", [0, 1, 2, 3])
    for end in range(CHILDREN_LOOKED_AT - 1):
        finished(simulation, f"r{end}", [50 + end] * 4)
    assert matched(simulation, [0, 1, 2, 60]) == 3
    finished(simulation, "one more", [90] * 4)
    assert matched(simulation, [0, 1, 2, 60]) == 0
    assert matched(simulation, [0, 1, 2, 3, 60]) == 4  # by its key it is always found


def test_a_longer_tail_replaces_a_shorter_one():
    simulation = KVSimulation(60, 4)
    finished(simulation, "a", tokens(6))
    assert simulation.manager.stats.cached_pages == 2
    finished(simulation, "b", tokens(7))
    assert simulation.manager.stats.cached_pages == 2
    assert matched(simulation, [*tokens(7), 50]) == 7
    finished(simulation, "c", tokens(6))
    assert simulation.manager.stats.cached_pages == 2


def test_an_equal_tail_that_is_not_looked_at_is_kept_once():
    simulation = KVSimulation(60, 4)
    finished(simulation, "a", tokens(3))
    for end in range(CHILDREN_LOOKED_AT):
        finished(simulation, f"r{end}", [50 + end] * 4)
    num_cached = simulation.manager.stats.cached_pages
    finished(simulation, "b", tokens(3))
    assert simulation.manager.stats.cached_pages == num_cached


def test_nothing_is_left_of_a_salt_that_is_not_used():
    simulation = KVSimulation(9, 4)
    for turn in range(20):
        finished(simulation, f"r{turn}", tokens(10), salt=f"user{turn}")
    assert len(simulation.manager._cache.tree.roots) <= 4


# ---------------------------------------------------------------------- host memory


@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,)])
def test_evicted_pages_come_back_from_host_memory(windows: tuple[int | None, ...]):
    simulation = KVSimulation(25, 4, windows, host_pages=40)
    finished(simulation, "a", tokens(20))
    num_cached = simulation.manager.stats.cached_pages
    evict_all(simulation)
    stats = simulation.manager.stats
    assert stats.stored_pages == stats.evicted_pages == stats.host_pages == num_cached
    assert matched(simulation, [*tokens(20), 77]) == 20
    again = start(simulation, "b", [*tokens(20), 77])
    assert again.request.num_cached_tokens == 20
    # Of a windowed group only what the query at 20 sees: 16 to 20.
    assert simulation.manager.stats.loaded_pages == sum(1 if w else 5 for w in windows)


def test_without_host_memory_evicted_pages_are_lost():
    simulation = KVSimulation(11, 4)
    finished(simulation, "a", tokens(20))
    fill(simulation, 40)
    assert matched(simulation, tokens(21)) == 0


def test_nothing_is_stored_while_computing_is_cheaper():
    simulation = KVSimulation(11, 4, host_pages=20)
    simulation.manager.swap_is_cheaper = False
    finished(simulation, "a", tokens(20))
    fill(simulation, 40)
    assert simulation.manager.stats.stored_pages == 0
    assert matched(simulation, tokens(21)) == 0


def test_the_page_evicted_longest_ago_leaves_host_memory():
    simulation = KVSimulation(9, 4, host_pages=4)
    finished(simulation, "a", tokens(8))
    finished(simulation, "b", tokens(8, 100))
    finished(simulation, "c", tokens(8, 200))
    fill(simulation, 32)
    assert matched(simulation, tokens(9)) == 0
    assert matched(simulation, tokens(9, 100)) == 8
    assert matched(simulation, tokens(9, 200)) == 8


def test_a_page_evicted_again_is_not_stored_again():
    simulation = KVSimulation(9, 4, host_pages=20)
    finished(simulation, "a", tokens(8))
    fill(simulation, 32)
    assert simulation.manager.stats.stored_pages == 2
    finished(simulation, "b", tokens(9))
    fill(simulation, 32)
    stats = simulation.manager.stats
    assert (stats.loaded_pages, stats.stored_pages) == (2, 2)
    assert matched(simulation, tokens(9)) == 8


def test_a_slot_whose_page_is_back_makes_room_first():
    simulation = KVSimulation(9, 4, host_pages=4)
    finished(simulation, "a", tokens(8))
    finished(simulation, "b", tokens(8, 100))
    fill(simulation, 32)
    run = start(simulation, "c", tokens(9, 100))  # b's two pages are in the pool again
    finished(simulation, "d", tokens(8, 200))
    fill(simulation, 20)
    assert simulation.manager.stats.stored_pages == 6
    assert matched(simulation, tokens(9)) == 8
    assert matched(simulation, tokens(9, 200)) == 8
    simulation.run_to(run, 12)


def test_stored_and_loaded_in_one_batch():
    simulation = KVSimulation(9, 4, host_pages=20)
    finished(simulation, "a", tokens(8))
    first = simulation.admit(make_request("b", tokens(23, 100)))  # evicts nothing but the free
    assert first is not None
    second = simulation.admit(make_request("c", tokens(6, 300)))  # evicts both
    assert second is not None
    simulation.end(first)
    third = simulation.admit(make_request("d", tokens(9)))
    assert third is not None
    assert third.request.num_computed == 8
    transfers = simulation.manager.take_transfers()
    assert sorted(slot for _, slot in transfers.stores) == sorted(s for s, _ in transfers.loads)
    simulation.apply(transfers)
    for run in (second, third):
        simulation.run_to(run, 12)


def test_a_page_in_host_memory_is_copied_from_there():
    simulation = KVSimulation(9, 4, host_pages=20)
    finished(simulation, "a", tokens(8))
    fill(simulation, 32)
    run = simulation.admit(make_request("b", [*tokens(7), 50, 51]))
    assert run is not None
    assert run.request.num_computed == 7
    transfers = simulation.manager.take_transfers()
    assert len(transfers.loads) == 2  # one page as it is, one to be written on
    assert not transfers.copies
    simulation.apply(transfers)
    simulation.run_to(run, 12)
    assert matched(simulation, [*tokens(8), 60]) == 8  # the original is still in its slot


# ---------------------------------------------------------------------- the parts


def test_moves_name_what_was_there_before_the_batch():
    moves = PageMoves()
    moves.fill(5, Origin(page=3))
    assert moves.origin(5) == Origin(page=3)
    moves.fill(6, moves.origin(5))
    moves.fill(7, Origin(slot=2))
    assert moves.origin(7) == Origin(slot=2)
    moves.fill(8, Origin(page=8))  # it is to be copied from itself
    moves.store(4, 1)
    with pytest.raises(AssertionError, match="does not hold"):
        moves.store(6, 0)
    with pytest.raises(AssertionError, match="filled twice"):
        moves.fill(5, Origin(page=1))
    transfers = moves.take()
    assert transfers.copies == ((3, 5), (3, 6))
    assert transfers.loads == ((2, 7),)
    assert transfers.stores == ((4, 1),)
    assert moves.take().is_empty


def test_moves_into_pages_that_change_hands_are_dropped():
    moves = PageMoves()
    moves.fill(5, Origin(page=3))
    moves.fill(6, moves.origin(5))
    moves.fill(7, Origin(slot=2))
    moves.forget_pages([5, 7])
    transfers = moves.take()
    assert (transfers.copies, transfers.loads) == (((3, 6),), ())


def test_pinned_slots_are_handed_out_after_the_batch():
    slots = HostSlots(1)
    node = Node(b"key", None, b"", 2)
    slot = slots.take(node, 0)
    assert slots.take(node, 1) == NO_SLOT
    slots.pin(slot)
    assert slots.oldest() == NO_SLOT
    slots.free(slot)
    assert node.slots == [NO_SLOT, NO_SLOT]
    assert slots.take(node, 1) == NO_SLOT
    slots.check_integrity()
    slots.unpin_all()
    slots.check_integrity()
    assert slots.take(node, 1) == slot
    slots.check_integrity()
