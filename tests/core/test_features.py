"""Features in the pool: written at their tokens' slots, moved with their pages."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.features import FeatureForm, captured, read_features, write_features
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool, pool_shapes, shapes_of_pages
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.core.mesh import make_mesh, pool_shardings
from jaxserve.engine.page_programs import copy_pages, read_pages, scrub_pages, write_pages

SPEC = KVSpec((KVGroup("all", (0, 1), 2, 8),))
PAGES, PAGE_SIZE, SIZE = 6, 4, 3
FORM = FeatureForm((), SIZE, "float32", 0)
BACKENDS = ("reference", "interpret")


def pool(backend: str) -> KVPool:
    """Every feature of page p is p."""
    made = make_pool(
        kv_layout(SPEC), PAGES, PAGE_SIZE, np.dtype(np.int8), backend=backend, features=FORM
    )
    assert made.features is not None
    slots = jnp.arange(PAGES * PAGE_SIZE)
    values = jnp.broadcast_to((slots // PAGE_SIZE)[:, None].astype(float), (len(slots), SIZE))
    return replace(made, features=write_features(made.features, slots, values))


def pages(of: KVPool) -> list[float]:
    """What each page's features are filled with."""
    assert of.features is not None
    flat = np.asarray(of.features).reshape(-1, PAGE_SIZE * SIZE)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def test_what_a_step_captures() -> None:
    hidden, taps = jnp.ones((2, 3)), {"a": jnp.zeros((2, 1)), "b": jnp.full((2, 2), 7.0)}
    np.testing.assert_array_equal(captured((), hidden, taps), hidden)
    np.testing.assert_array_equal(captured(("b", "a"), hidden, taps), [[7, 7, 0]] * 2)


@pytest.mark.parametrize("leading", [(), (1,)])
def test_tokens_are_written_at_their_slots_and_padding_nowhere(leading: tuple[int, ...]) -> None:
    features = jnp.zeros((*leading, PAGES, PAGE_SIZE, SIZE))
    values = np.arange(1, 4, dtype=np.float32)[:, None] * np.ones(SIZE, np.float32)
    slots = np.array([9, -1, 22], np.int32)
    written = write_features(features, slots, values)
    assert written.shape == features.shape
    want = np.zeros((PAGES * PAGE_SIZE, SIZE), np.float32)
    want[9], want[22] = 1, 3
    np.testing.assert_array_equal(np.asarray(written).reshape(want.shape), want)
    np.testing.assert_array_equal(read_features(written, slots)[::2], want[[9, 22]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_move_with_their_pages(backend: str) -> None:
    filled = pool(backend)
    assert pages(filled) == [0, 1, 2, 3, 4, 5]
    ids = np.array([3, 1, PAGES], np.int32)  # one past the end: padding
    assert pages(copy_pages(filled, np.array([1, 3, 2], np.int32), ids)) == [0, 3, 2, 1, 4, 5]
    read = read_pages(filled, np.array([4, 2], np.int32))
    assert pages(read) == [4, 2]
    for leaf, want in zip(
        jax.tree.leaves(read), jax.tree.leaves(shapes_of_pages(filled, 2)), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    assert pages(write_pages(filled, np.array([1, PAGES], np.int32), read)) == [0, 4, 2, 3, 4, 5]
    assert pages(scrub_pages(filled, np.array([5, 0], np.int32))) == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_and_places(backend: str) -> None:
    """Features have no heads that devices could split; without them the pool is as ever."""
    layout = kv_layout(SPEC)
    shapes = pool_shapes(layout, PAGES, PAGE_SIZE, np.dtype(np.int8), backend, FORM)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    page = layout.page_bytes(PAGE_SIZE, 1) + FORM.page_bytes(PAGE_SIZE)
    assert total == PAGES * page
    places = pool_shardings(make_mesh(jax.devices()[:2]), shapes)
    assert places.features.is_fully_replicated
    without = pool_shapes(layout, PAGES, PAGE_SIZE, np.dtype(np.int8), backend)
    assert without.features is None
    assert len(jax.tree.leaves(shapes)) == len(jax.tree.leaves(without)) + 1
