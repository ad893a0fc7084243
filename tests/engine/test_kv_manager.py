"""The KV manager rule by rule: sizes, windows, sharing, copy-on-write, twins, eviction, hosts."""

import pytest

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.prefix_hit import min_tail_tokens
from tests.support.kv_simulation import (
    PAGE,
    KVSimulation,
    Run,
    finished,
    make_request,
    matched,
    start,
    tokens,
)

# ---------------------------------------------------------------------- sizes


def test_global_groups_need_pages_for_all_tokens():
    manager = KVManager(41, PAGE, (None, None), max_chunk=8)
    assert [manager.pages_needed(n) for n in (0, 1, 4, 5)] == [0, 2, 2, 4]
    assert manager.capacity_tokens == 80


def test_windowed_groups_need_window_and_two_chunks():
    manager = KVManager(100, PAGE, (5,), max_chunk=8)
    # 5 - 1 + 2 * 8 = 20 tokens, which may begin at the last slot of a page: 1 + 19 tokens.
    assert manager.pages_needed(1000) == 6
    assert manager.pages_needed(9) == 3
    assert manager.capacity_tokens > 1_000_000
    assert KVManager(6, PAGE, (5,), max_chunk=8).capacity_tokens == 20


def test_groups_share_one_budget():
    manager = KVManager(31, PAGE, (None, 5), max_chunk=8)
    assert manager.capacity_tokens == (30 - 6) * PAGE


@pytest.mark.parametrize("settings", [{"max_chunk": 0}, {"max_chunk": 1, "windows": (0,)}])
def test_impossible_settings_are_refused(settings: dict[str, object]):
    with pytest.raises(ValueError, match="at least 1"):
        KVManager(10, PAGE, **settings)  # type: ignore[arg-type]


def test_admission_takes_all_or_nothing():
    simulation = KVSimulation(6, PAGE)
    assert simulation.admit(make_request("a", tokens(9))) is not None
    assert simulation.admit(make_request("b", tokens(9, 50))) is None
    assert (simulation.manager.num_free, simulation.manager.num_used) == (2, 3)


def test_grow_takes_all_or_nothing():
    simulation = KVSimulation(5, PAGE, (None, None))
    run = simulation.admit(make_request("a", tokens(3)))
    other = simulation.admit(make_request("b", tokens(3, 50)))
    assert run is not None
    assert other is not None
    assert not simulation.manager.grow(run.request, 5)
    assert [len(pages) for pages in run.request.pages] == [1, 1]
    simulation.end(other)
    assert simulation.manager.grow(run.request, 5)
    assert [len(pages) for pages in run.request.pages] == [2, 2]


# ---------------------------------------------------------------------- windows


def test_windowed_groups_take_the_first_chunk_and_give_back_what_nobody_sees():
    simulation = KVSimulation(40, PAGE, (None, 5), prefix_cache=False)
    run = simulation.admit(make_request("a", tokens(30)))
    assert run is not None
    assert [len(pages) for pages in run.request.pages] == [8, 2]
    for stop, gone in ((8, 1), (16, 3), (24, 5)):
        assert simulation.plan(run, 8)
        simulation.dispatch()
        simulation.commit()
        assert run.request.num_computed == stop
        # The query at `stop` sees stop - 4 and later.
        assert [index for index, page in enumerate(run.request.pages[1]) if page == 0] == (
            tokens(gone)
        )
    assert all(run.request.pages[0])


def test_given_back_pages_stay_findable():
    """Another request that shares only the beginning finds its windowed pages too."""
    simulation = KVSimulation(60, PAGE, (None, 5))
    run = start(simulation, "a", tokens(30))
    assert run.request.pages[1][:6] == [0] * 6
    assert matched(simulation, [*tokens(12), 90]) == 12
    other = start(simulation, "b", [*tokens(12), 90, 91])
    assert other.request.num_cached_tokens == 12


# ---------------------------------------------------------------------- hits


def test_identical_repeat_recomputes_only_the_last_token():
    simulation = KVSimulation(40, PAGE)
    finished(simulation, "a", tokens(12))
    assert matched(simulation, tokens(12)) == 11
    again = start(simulation, "b", tokens(12))
    assert again.request.num_cached_tokens == 11
    assert simulation.manager.stats.copied_pages == 1  # the last page, for 3 of its tokens


def test_running_requests_share_full_pages():
    simulation = KVSimulation(40, PAGE)
    first = start(simulation, "a", tokens(10))
    second = start(simulation, "b", [*tokens(8), 70, 71])
    assert second.request.pages[0][:2] == first.request.pages[0][:2]
    assert simulation.manager.num_used == 4


def test_nothing_uncommitted_is_found():
    simulation = KVSimulation(40, PAGE)
    run = simulation.admit(make_request("a", tokens(8)))
    assert run is not None
    assert matched(simulation, tokens(9)) == 0
    simulation.plan(run, 8)
    simulation.dispatch()
    assert matched(simulation, tokens(9)) == 0
    simulation.commit()
    assert matched(simulation, tokens(9)) == 8


def test_a_follow_up_finds_prompt_and_output():
    simulation = KVSimulation(40, PAGE)
    run = start(simulation, "a", tokens(10))
    simulation.run_to(run, 21)
    simulation.end(run)
    everything = run.request.token_ids(0, 20)
    assert matched(simulation, [*everything, 88, 89]) == 20
    # Of a partly filled last page too: 18 tokens of the 20 are 4 pages and 2 tokens.
    assert matched(simulation, [*everything[:18], 88, 89]) == 18


def test_partly_filled_last_page_is_copied():
    simulation = KVSimulation(40, PAGE)
    run = finished(simulation, "a", tokens(11))
    again = simulation.admit(make_request("b", [*tokens(11), 60, 61]))
    assert again is not None
    assert again.request.num_computed == 11
    transfers = simulation.manager.take_transfers()
    (copy,) = transfers.copies
    assert copy[1] == again.request.pages[0][2]
    assert copy[0] != copy[1]
    assert not transfers.loads
    assert run.request.pages == ()
    simulation.apply(transfers)
    simulation.run_to(again, 14)


def test_few_common_tokens_are_not_worth_a_copy():
    assert [min_tail_tokens(size) for size in (1, 2, 4, 16, 64)] == [1, 1, 2, 5, 17]
    simulation = KVSimulation(40, PAGE)
    finished(simulation, "a", tokens(8))
    assert matched(simulation, [0, 50, 51]) == 0
    assert matched(simulation, [0, 1, 51]) == 2


def test_preempted_work_is_found_again():
    simulation = KVSimulation(40, PAGE)
    run = start(simulation, "a", tokens(10))
    simulation.run_to(run, 15)
    simulation.end(run, preempt=True)
    again = simulation.admit(run.request)
    assert again is not None
    assert run.request.num_computed == 14
    assert run.request.num_cached_tokens == 0  # what its first start found
    simulation.run_to(again, 20)


def test_in_flight_writes_of_an_ended_request_harm_nobody():
    simulation = KVSimulation(12, PAGE)
    run = start(simulation, "a", tokens(10))
    assert simulation.plan(run, 1)
    simulation.dispatch()
    simulation.end(run)
    other = start(simulation, "b", [*tokens(10), 50])
    assert other.request.num_cached_tokens == 10
    simulation.run_to(other, 20)


def test_cache_off_finds_nothing():
    simulation = KVSimulation(40, PAGE, prefix_cache=False, host_pages=5)
    finished(simulation, "a", tokens(12))
    assert matched(simulation, tokens(12)) == 0
    assert simulation.manager.stats.cached_pages == 0
    assert simulation.manager.num_free == 39


# ---------------------------------------------------------------------- B12: never shared


@pytest.mark.parametrize("host_pages", [0, 20])
@pytest.mark.parametrize("other", [{"salt": "Y"}, {"salt": ""}, {"salt": "X", "adapter_id": 1}])
def test_b12_salt_and_adapter_instance_keep_caches_apart(other: dict[str, object], host_pages: int):
    simulation = KVSimulation(40, PAGE, host_pages=host_pages)
    first = start(simulation, "a", tokens(12), salt="X")
    assert matched(simulation, tokens(12), **other) == 0
    second = start(simulation, "b", tokens(12), source=first, **other)
    assert second.request.num_cached_tokens == 0
    simulation.end(first)
    simulation.end(second)
    assert matched(simulation, tokens(12), salt="X") == 11
    assert matched(simulation, tokens(12), **other) == 11  # its own
    assert matched(simulation, tokens(12), salt="Z") == 0


def test_b12_the_kind_of_kv_is_in_every_key():
    keys = set()
    for kind in ("float32", "int8"):
        for salt, adapter_id in (("", 0), ("1", 0), ("", 1), ("0", 1), ("01:", 0)):
            simulation = KVSimulation(40, PAGE, kind=kind)
            run = start(simulation, "a", tokens(4), salt=salt, adapter_id=adapter_id)
            keys.add(run.request.page_hashes[0])
    assert len(keys) == 10
    assert {len(key) for key in keys} == {16}


def test_b12_parts_of_the_root_key_do_not_run_together():
    def key(kind: str, salt: str) -> bytes:
        simulation = KVSimulation(40, PAGE, kind=kind)
        return start(simulation, "a", tokens(4), salt=salt).request.page_hashes[0]

    assert key("a", "b") != key("ab", "")
    assert key("a", "1:b") != key("a1:b", "")
    assert key("", "\ud800") != key("", "?")


# ---------------------------------------------------------------------- sources


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_source_gives_its_partly_filled_page(prefix_cache: bool):
    simulation = KVSimulation(40, PAGE, prefix_cache=prefix_cache)
    leader = start(simulation, "a", tokens(11))
    simulation.run_to(leader, 14)
    follower = simulation.admit(make_request("b", tokens(11)), leader)
    assert follower is not None
    assert follower.request.num_computed == 10
    assert follower.request.pages[0][:2] == leader.request.pages[0][:2]
    assert follower.request.pages[0][2] != leader.request.pages[0][2]
    simulation.run_to(follower, 20)
    simulation.run_to(leader, 20)


def test_three_followers_in_one_batch():
    """The second one copies from a page that the first one's copy is yet to fill."""
    simulation = KVSimulation(40, PAGE)
    leader = start(simulation, "a", tokens(11))
    runs = [leader]
    for name in "bcd":
        run = simulation.admit(make_request(name, tokens(11)), runs[-1])
        assert run is not None
        assert run.request.num_computed == 10
        runs.append(run)
    transfers = simulation.manager.take_transfers()
    assert {source for source, _ in transfers.copies} == {leader.request.pages[0][2]}
    simulation.apply(transfers)
    for run in runs:
        simulation.run_to(run, 18)


def test_source_that_gave_back_what_is_needed_gives_nothing():
    simulation = KVSimulation(60, PAGE, (4,), prefix_cache=False)
    leader = start(simulation, "a", tokens(12))
    simulation.run_to(leader, 30)
    follower = simulation.admit(make_request("b", tokens(12)), leader)
    assert follower is not None
    assert follower.request.num_computed == 0


def test_a_fork_shares_prompt_and_output():
    simulation = KVSimulation(40, PAGE)
    parent = start(simulation, "a", tokens(6))
    simulation.run_to(parent, 13)
    child = make_request("b", tokens(6))
    child.output_token_ids = list(parent.request.output_token_ids)
    run = simulation.admit(child, parent)
    assert run is not None
    assert child.num_computed == 12
    simulation.run_to(run, 20)


# ---------------------------------------------------------------------- twins


def twins(simulation: KVSimulation) -> tuple[Run, Run]:
    """Two requests that compute the same two pages at once, and go on differently."""
    runs = [simulation.admit(make_request(n, tokens(8) + [40 + i] * 3)) for i, n in enumerate("ab")]
    first, second = runs
    assert first is not None
    assert second is not None
    for run in (first, second):
        simulation.run_to(run, 12)
    return first, second


def test_page_ids_of_a_running_request_never_change():
    simulation = KVSimulation(40, PAGE)
    first, second = twins(simulation)
    assert not set(first.request.pages[0]) & set(second.request.pages[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_twin_pages_are_kept_once(order: tuple[int, int]):
    simulation = KVSimulation(40, PAGE)
    runs = twins(simulation)
    simulation.end(runs[order[0]])
    assert matched(simulation, tokens(9)) == 8
    # What is idle: the own last page of the one that ended, and not its two twin pages.
    assert simulation.manager.stats.cached_pages == 1
    simulation.end(runs[order[1]])
    assert matched(simulation, tokens(9)) == 8
    assert simulation.manager.stats.cached_pages == 4
    for tail in (40, 41):  # both continuations are found
        assert matched(simulation, tokens(8) + [tail] * 3 + [0]) == 11


def test_an_idle_page_gives_way_to_one_in_use():
    simulation = KVSimulation(40, PAGE)
    first = simulation.admit(make_request("a", tokens(8)))
    second = simulation.admit(make_request("b", tokens(8)))
    assert first is not None
    assert second is not None
    simulation.run_to(first, 9)
    simulation.end(first)
    assert simulation.manager.stats.cached_pages == 2
    simulation.run_to(second, 9)
    assert simulation.manager.stats.cached_pages == 0
    assert matched(simulation, tokens(9)) == 8


# ---------------------------------------------------------------------- ends and losses


def test_discarded_work_is_not_found_and_its_pages_are_named():
    simulation = KVSimulation(40, PAGE)
    first = start(simulation, "a", tokens(12))
    second = start(simulation, "b", [*tokens(8), 50])
    alone = set(first.request.pages[0]) - set(second.request.pages[0])
    assert set(simulation.end(first, discard=True)) == alone
    assert matched(simulation, tokens(12)) == 0
    simulation.run_to(second, 20)  # goes on with the pages it holds
    simulation.end(second)
    assert matched(simulation, tokens(12)) == 0
    assert simulation.manager.num_free == 39


def test_release_twice_and_of_a_waiting_request_changes_nothing():
    simulation = KVSimulation(10, PAGE)
    run = start(simulation, "a", tokens(8))
    simulation.end(run)
    simulation.manager.release(run.request)
    assert simulation.manager.discard(run.request) == []
    simulation.manager.release(make_request("b", tokens(3)))
    simulation.check()


def test_clear_forgets_everything():
    simulation = KVSimulation(10, PAGE, host_pages=10)
    for turn in range(4):
        finished(simulation, f"r{turn}", tokens(20, 30 * turn))
    run = start(simulation, "a", tokens(8))
    with pytest.raises(AssertionError, match="hold pages"):
        simulation.manager.clear()
    simulation.end(run)
    simulation.clear()
    assert matched(simulation, tokens(9)) == 0
    assert simulation.manager.take_transfers().is_empty
    stats = simulation.manager.stats
    assert (stats.cached_pages, stats.host_pages) == (0, 0)
    assert stats.stored_pages > 0  # counts go on


def test_check_integrity_notices_damage():
    simulation = KVSimulation(40, PAGE)
    run = start(simulation, "a", tokens(10))
    simulation.check()
    with pytest.raises(AssertionError, match="unknown"):
        simulation.manager.check_integrity([])
    page = run.request.pages[0][-1]
    run.request.pages[0][-1] = run.request.pages[0][0]
    with pytest.raises(AssertionError):
        simulation.check()
    run.request.pages[0][-1] = page
    simulation.check()
