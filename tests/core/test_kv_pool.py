"""Stacked pools: their arrays are those the layout asks for, and pages move in and out of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import StackedPool, make_pool, pool_shapes, shapes_of_pages
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.core.mesh import make_mesh, pool_shardings
from jaxserve.engine.page_programs import copy_pages, read_pages, scrub_pages, write_pages

WINDOWED = KVSpec((KVGroup("global", (2, 5), 2, 8), KVGroup("windowed", (0, 1, 3, 4), 2, 8, 7)))
MIXED = KVSpec((KVGroup("wide", (0, 2), 2, 16), KVGroup("narrow", (1,), 4, 8)))
PAGES, PAGE_SIZE = 6, 16
TYPES = [np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)]


def filled(spec: KVSpec, dtype: np.dtype) -> StackedPool:
    """Every number of page p is p."""
    pool = make_pool(kv_layout(spec), PAGES, PAGE_SIZE, dtype, backend="interpret")
    assert isinstance(pool, StackedPool)
    numbers = jnp.arange(PAGES)

    def fill(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(numbers.reshape(1, -1, *[1] * (leaf.ndim - 2)), leaf.shape).astype(
            leaf.dtype
        )

    return jax.tree.map(fill, pool)


def contents(pool: StackedPool) -> list[list[float]]:
    """Of each array, the number each page is filled with; every layer's is the same."""
    numbers = []
    for leaf in jax.tree.leaves(pool):
        pages = np.asarray(leaf, np.float32).swapaxes(0, 1).reshape(PAGES, -1)
        assert (pages == pages[:, :1]).all()
        numbers.append(pages[:, 0].tolist())
    return numbers


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("spec", [WINDOWED, MIXED])
def test_bytes_and_places(spec: KVSpec, dtype: np.dtype) -> None:
    layout = kv_layout(spec)
    pool = pool_shapes(layout, PAGES, PAGE_SIZE, dtype, "mosaic_gpu")
    assert isinstance(pool, StackedPool)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert total == PAGES * layout.page_bytes(PAGE_SIZE, dtype.itemsize)
    for layer, (stack, index) in enumerate(pool.place_of_layer):
        group = spec.groups[spec.group_of_layer(layer)]
        arrays, *shape = pool.keys[stack].shape
        assert shape == [PAGES, group.num_kv_heads, PAGE_SIZE, group.head_dim]
        assert index < arrays
        ends = (group.head_dim, PAGE_SIZE) if dtype.itemsize == 1 else (PAGE_SIZE, group.head_dim)
        assert pool.values[stack].shape[-2:] == ends
    assert bool(pool.key_scales) == (dtype.itemsize == 1)
    for array, table in enumerate(layout.tables):
        places = [pool.place_of_layer[layer] for layer in table.layers]
        assert len(set(places)) == len(places), f"layers of table {array} share an array"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_pages_are_copied_read_written_and_cleared(dtype: np.dtype) -> None:
    pool = filled(MIXED, dtype)
    ids = np.array([3, 1, PAGES], np.int32)  # one past the end: padding
    copied = copy_pages(pool, np.array([1, 3, 2], np.int32), ids)
    assert contents(copied) == [[0, 3, 2, 1, 4, 5]] * len(jax.tree.leaves(pool))
    read = read_pages(pool, np.array([4, 2], np.int32))
    wanted = shapes_of_pages(pool, 2)
    for leaf, want in zip(jax.tree.leaves(read), jax.tree.leaves(wanted), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert (np.asarray(leaf, np.float32).reshape(2, -1) == [[4], [2]]).all()
    written = write_pages(pool, np.array([1, PAGES], np.int32), read)
    assert contents(written) == [[0, 4, 2, 3, 4, 5]] * len(jax.tree.leaves(pool))
    cleared = scrub_pages(pool, np.array([5, 0], np.int32))
    assert contents(cleared) == [[0, 1, 2, 3, 4, 0]] * len(jax.tree.leaves(pool))


def test_two_devices_split_the_heads_of_the_pool_and_of_pages() -> None:
    mesh = make_mesh(jax.devices()[:2])
    pool = pool_shapes(kv_layout(WINDOWED), PAGES, PAGE_SIZE, np.dtype(np.int8), "mosaic_gpu")
    for tree in (pool, shapes_of_pages(pool, 3)):
        leaves = jax.tree.leaves(tree)
        places = jax.tree.leaves(pool_shardings(mesh, tree))
        for leaf, place in zip(leaves, places, strict=True):
            shard = place.shard_shape(leaf.shape)
            assert leaf.shape[2] == 2
            assert shard[2] == 2 // mesh.size
            assert shard[:2] + shard[3:] == leaf.shape[:2] + leaf.shape[3:]
