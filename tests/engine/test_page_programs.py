"""Whole pages moved within the pool, to the host and back, between steps and in their order."""

from functools import cache

import jax
import numpy as np
import pytest

from jaxserve.engine.host_pages import HostPages, apply_transfers, slots_in
from jaxserve.engine.page_programs import BATCH
from jaxserve.engine.plan import Transfers
from jaxserve.engine.runner import Runner
from tests.support.tiny_engine import tiny_engine

NUM_PAGES = 50
MANY = list(range(1, 3 * BATCH))  # two full batches and a part of one


@cache
def runner_of(kv_cache_dtype: str = "auto") -> Runner:
    engine = tiny_engine(num_pages=NUM_PAGES, kv_cache_dtype=kv_cache_dtype, max_batch_rows=1)
    return engine.runner


@pytest.fixture(params=["auto", "int8"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Page p of every array holds numbers made of p."""
    runner = runner_of(request.param)
    runner.reset()
    contents = tuple(
        np.broadcast_to(
            (np.arange(1, NUM_PAGES) + 50 * index).reshape(-1, *[1] * (leaf.ndim - 1)),
            (NUM_PAGES - 1, *leaf.shape[1:]),
        ).astype(leaf.dtype)
        for index, leaf in enumerate(jax.tree.leaves(runner.pool))
    )
    runner.write_pages(range(1, NUM_PAGES), contents)
    return runner


def content(runner: Runner) -> list[np.ndarray]:
    """Of each array, the number each page is filled with."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(runner.pool)]
    numbers = [leaf.reshape(NUM_PAGES, -1) for leaf in leaves]
    for number in numbers:
        assert (number == number[:, :1]).all(), "a page is mixed"
    return [number[:, 0].copy() for number in numbers]


def test_what_is_written_is_read(runner: Runner) -> None:
    """Page 0 and the pages that are not named stay as they are."""
    before = content(runner)
    assert all(number[0] == 0 for number in before)
    handle = runner.read_pages(MANY)
    assert handle.num_pages == len(MANY)
    contents = handle.result()
    assert [leaf.shape[0] for leaf in contents] == [len(MANY)] * len(before)
    runner.write_pages(MANY[::-1], contents)
    for old, new in zip(before, content(runner), strict=True):
        expected = old.copy()
        expected[MANY[::-1]] = old[MANY]
        np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 4)],
        [(3, 4), (4, 3)],
        [(page, page + 20) for page in MANY],
        [(page, page % 23 + 1) for page in MANY],  # all read what another batch writes
    ],
    ids=["one", "swapped", "many", "in a circle"],
)
def test_copies_read_everything_first(runner: Runner, pairs: list[tuple[int, int]]) -> None:
    before = content(runner)
    runner.copy_pages(pairs)
    for old, new in zip(before, content(runner), strict=True):
        expected = old.copy()
        expected[[target for _, target in pairs]] = old[[source for source, _ in pairs]]
        np.testing.assert_array_equal(new, expected)


def test_pages_are_read_as_they_were_when_asked_for(runner: Runner) -> None:
    """Nobody waits in between: the order on the device is that of the calls."""
    before = content(runner)
    handle = runner.read_pages(MANY)
    runner.scrub(MANY)
    runner.copy_pages([(30, 1)])
    for old, leaf in zip(before, handle.result(), strict=True):
        np.testing.assert_array_equal(leaf.reshape(len(MANY), -1)[:, 0], old[MANY])
    for old, new in zip(before, content(runner), strict=True):
        assert new[1] == old[30]
        assert (new[MANY[1:]] == 0).all()


def test_the_pool_is_updated_in_place(runner: Runner) -> None:
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.pool))
    for name in ("copy", "write", "scrub"):
        analysis = runner._helpers[name].result().compiled.memory_analysis()
        assert analysis.alias_size_in_bytes >= pool_bytes, name
        assert analysis.temp_size_in_bytes < pool_bytes / 2, name
    analysis = runner._helpers["read"].result().compiled.memory_analysis()
    assert analysis.output_size_in_bytes < pool_bytes / 2
    assert analysis.temp_size_in_bytes < pool_bytes / 2


def test_transfers_store_then_copy_then_load(runner: Runner) -> None:
    """Slots keep what pages held before the batch, also a page that is loaded into in it."""
    before = content(runner)
    host = HostPages(40, runner.pool)
    first = Transfers(stores=tuple((page, page + 5) for page in MANY), copies=((1, 40), (40, 41)))
    moved, seconds = apply_transfers(runner, host, first)
    assert moved == len(MANY)
    assert seconds > 0
    runner.scrub(MANY)
    second = Transfers(
        stores=((45, 0), (46, 7)),  # slot 7 had page 2
        loads=(*((page + 5, page) for page in MANY if page != 2), (0, 2), (7, 48)),
    )
    assert apply_transfers(runner, host, second)[0] == 2 + len(MANY) + 1
    for old, new in zip(before, content(runner), strict=True):
        expected = old.copy()
        expected[[40, 41, 2, 48]] = old[[1, 40, 45, 46]]
        np.testing.assert_array_equal(new, expected)


def test_nothing_to_move_takes_nothing(runner: Runner) -> None:
    host = HostPages(0, runner.pool)
    assert apply_transfers(runner, host, Transfers())[0] == 0


def test_what_is_on_its_way_is_bounded(runner: Runner) -> None:
    host = HostPages(200, runner.pool)
    for start in range(20):
        host.store(range(start * BATCH, (start + 1) * BATCH), runner.read_pages(MANY[:BATCH]))
        assert sum(len(store.slots) for store in host._pending) <= 8 * BATCH
    expected = content(runner)
    for old, leaf in zip(expected, host.load(range(160)), strict=True):
        numbers = leaf.reshape(20, BATCH, -1)[..., 0]
        np.testing.assert_array_equal(numbers, np.tile(old[MANY[:BATCH]], (20, 1)))


def test_slots_in() -> None:
    assert [slots_in(n, 100) for n in (0, 99, 100, 1050)] == [0, 0, 1, 10]
