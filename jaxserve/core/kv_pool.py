"""The paged KV pool, in the two forms that backends read: arrays side by side, or stacked.

Which layer uses which pair of arrays, under which page table, says the layout (kv_layout.py).
Opaque to models: they hand the pool to `ops.attend` and take it back.

Separate: a pair of arrays for each place in a table group; what the reference and the native CPU
kernels read. Stacked: all of them in one array, and a layer is an index into it, so that all layers
of a step share one GPU kernel, and pages lie as the Hopper kernels load them.

Where a draft reads features of the target (features.py), they are one more array of the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import numpy as np

from jaxserve.core.features import FeatureForm
from jaxserve.core.kv_layout import KVLayout
from pallas_kernels.zeros import zeros

# Backends whose pools are stacked; those of all others are separate.
STACKED = ("mosaic_gpu", "interpret")


class LayerKV(NamedTuple):
    """Arrays that a layer uses; the scales are None unless numbers are kept in 8 bits."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales", "features"],
    meta_fields=["array_of_layer"],
)
@dataclass(frozen=True)
class SeparatePool:
    """Keys and values [num_pages, page_size, num_kv_heads, head_dim], a pair for each place in a
    table group; array_of_layer says which a layer uses.

    Kept in 8 bits, a number stands for itself times the scale of its token and head: key_scales and
    value_scales hold float32 [num_pages, page_size, num_kv_heads] for each array, else nothing.
    features: [num_pages, page_size, size] for who reads them, else None.
    """

    page_axis: ClassVar[int] = 0  # of every array

    array_of_layer: tuple[int, ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()
    features: jax.Array | None = None

    def layer(self, layer: int) -> LayerKV:
        """The arrays a layer uses; its pages are those its own table names."""
        at = self.array_of_layer[layer]
        if not self.key_scales:
            return LayerKV(self.keys[at], self.values[at])
        return LayerKV(self.keys[at], self.values[at], self.key_scales[at], self.value_scales[at])

    def with_layer(self, layer: int, kv: LayerKV) -> "SeparatePool":
        """The pool with the arrays of one layer, and so of all that share them, replaced."""
        at = self.array_of_layer[layer]
        keys, values = _replace(self.keys, at, kv.keys), _replace(self.values, at, kv.values)
        if kv.key_scales is None or kv.value_scales is None:
            return replace(self, keys=keys, values=values)
        return replace(
            self,
            keys=keys,
            values=values,
            key_scales=_replace(self.key_scales, at, kv.key_scales),
            value_scales=_replace(self.value_scales, at, kv.value_scales),
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales", "features"],
    meta_fields=["place_of_layer"],
)
@dataclass(frozen=True)
class StackedPool:
    """A stack of pairs of arrays, or one for every shape that keys have in this model.

    keys [arrays, num_pages, num_kv_heads, page_size, head_dim]; values the same, but of 8 bits
    [arrays, num_pages, num_kv_heads, head_dim, page_size], as tensor cores want them; then
    key_scales and value_scales float32 [arrays, num_pages, num_kv_heads, page_size], else nothing.
    place_of_layer: (which stack, which of its arrays). features: [1, num_pages, page_size, size]
    for who reads them, else None.
    """

    page_axis: ClassVar[int] = 1

    place_of_layer: tuple[tuple[int, int], ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()
    features: jax.Array | None = None

    def stack(self, index: int) -> LayerKV:
        """The stacked arrays, of all layers that use them."""
        if not self.key_scales:
            return LayerKV(self.keys[index], self.values[index])
        scales = self.key_scales[index], self.value_scales[index]
        return LayerKV(self.keys[index], self.values[index], *scales)

    def with_stack(self, index: int, kv: LayerKV) -> "StackedPool":
        """The pool with one stack replaced."""
        keys, values = _replace(self.keys, index, kv.keys), _replace(self.values, index, kv.values)
        if kv.key_scales is None or kv.value_scales is None:
            return replace(self, keys=keys, values=values)
        return replace(
            self,
            keys=keys,
            values=values,
            key_scales=_replace(self.key_scales, index, kv.key_scales),
            value_scales=_replace(self.value_scales, index, kv.value_scales),
        )


KVPool = SeparatePool | StackedPool


def _replace(items: tuple[jax.Array, ...], index: int, item: jax.Array) -> tuple[jax.Array, ...]:
    return (*items[:index], item, *items[index + 1 :])


def pool_shapes(
    layout: KVLayout,
    num_pages: int,
    page_size: int,
    dtype: np.dtype,
    backend: str = "reference",
    features: FeatureForm | None = None,
) -> KVPool:
    """The pool as ShapeDtypeStructs: for planning and ahead-of-time compilation.

    dtype: of keys and values; one of 8 bits brings scales. backend: in the form that it reads.
    features: of the target that are kept too.
    """
    is_stacked = backend in STACKED
    make = _stacked_shapes if is_stacked else _separate_shapes
    pool: KVPool = make(layout, num_pages, page_size, dtype)
    if features is None:
        return pool
    shape = (*([1] * is_stacked), num_pages, page_size, features.size)
    return replace(pool, features=jax.ShapeDtypeStruct(shape, features.dtype))


def _separate_shapes(
    layout: KVLayout, num_pages: int, page_size: int, dtype: np.dtype
) -> SeparatePool:
    pages, scales = [], []
    for array in layout.arrays:
        shape = (num_pages, page_size, array.num_kv_heads)
        pages.append(jax.ShapeDtypeStruct((*shape, array.head_dim), dtype))
        if dtype.itemsize == 1:
            scales.append(jax.ShapeDtypeStruct(shape, np.float32))
    scales_of = tuple(scales)
    return SeparatePool(layout.array_of_layer, tuple(pages), tuple(pages), scales_of, scales_of)


def _stacked_shapes(
    layout: KVLayout, num_pages: int, page_size: int, dtype: np.dtype
) -> StackedPool:
    kinds = tuple(dict.fromkeys(layout.arrays))
    sizes = dict.fromkeys(kinds, 0)
    place_of_array = []
    for array in layout.arrays:
        place_of_array.append((kinds.index(array), sizes[array]))
        sizes[array] += 1
    keys, values, scales = [], [], []
    for kind in kinds:
        shape, page = (sizes[kind], num_pages, kind.num_kv_heads), (page_size, kind.head_dim)
        keys.append(jax.ShapeDtypeStruct((*shape, *page), dtype))
        if dtype.itemsize == 1:
            page = page[::-1]
            scales.append(jax.ShapeDtypeStruct((*shape, page_size), np.float32))
        values.append(jax.ShapeDtypeStruct((*shape, *page), dtype))
    places = tuple(place_of_array[array] for array in layout.array_of_layer)
    return StackedPool(places, tuple(keys), tuple(values), tuple(scales), tuple(scales))


def shapes_of_pages(pool: KVPool, count: int) -> KVPool:
    """Of `count` pages out of every array of the pool, or of its shapes: the pages come first."""
    axis = pool.page_axis
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (count, *leaf.shape[:axis], *leaf.shape[axis + 1 :]), leaf.dtype
        ),
        pool,
    )


def make_pool(
    layout: KVLayout,
    num_pages: int,
    page_size: int,
    dtype: np.dtype,
    place: Callable[[KVPool], KVPool] | None = None,
    backend: str = "reference",
    features: FeatureForm | None = None,
) -> KVPool:
    """Allocate a zeroed pool. Page 0 exists but is never handed out: padding points at it.

    place: gives the sharding of each array, for a pool of shapes; None: the default device.
    backend: in the form that it reads, with zeros of its own (see `pallas_kernels.zeros`).
    features: as in `pool_shapes`.
    """
    shapes = pool_shapes(layout, num_pages, page_size, dtype, backend, features)
    zeros_of = "cpu" if backend == "cpu" else "reference"
    places = None if place is None else place(shapes)
    make = jax.jit(partial(_zeros, shapes, zeros_of), out_shardings=places)
    return make()


def _zeros(shapes: KVPool, backend: str) -> KVPool:
    return jax.tree.map(partial(zeros, backend=backend), shapes)
