"""The paged KV pool of the CPU and reference backends: pairs of arrays that layers share.

Which layer uses which pair, under which page table, says the layout (kv_layout.py). Opaque to
models: they hand the pool to `ops.attend` and take it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.core.kv_layout import KVLayout
from pallas_kernels.zeros import zeros


class LayerKV(NamedTuple):
    """The arrays one layer uses; the scales are None unless they are kept in int8."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales"],
    meta_fields=["array_of_layer"],
)
@dataclass(frozen=True)
class KVPool:
    """Keys and values [num_pages, page_size, num_kv_heads, head_dim], a pair for each place in a
    table group; array_of_layer says which a layer uses.

    Kept in int8, a number stands for itself times the scale of its token and head: key_scales and
    value_scales hold float32 [num_pages, page_size, num_kv_heads] for each array, else nothing.
    """

    array_of_layer: tuple[int, ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()

    def layer(self, layer: int) -> LayerKV:
        """The arrays a layer uses; its pages are those its own table names."""
        at = self.array_of_layer[layer]
        if not self.key_scales:
            return LayerKV(self.keys[at], self.values[at])
        return LayerKV(self.keys[at], self.values[at], self.key_scales[at], self.value_scales[at])

    def with_layer(self, layer: int, kv: LayerKV) -> "KVPool":
        """The pool with the arrays of one layer, and so of all that share them, replaced."""
        at = self.array_of_layer[layer]
        keys, values = _replace(self.keys, at, kv.keys), _replace(self.values, at, kv.values)
        if kv.key_scales is None or kv.value_scales is None:
            return KVPool(self.array_of_layer, keys, values)
        return KVPool(
            self.array_of_layer,
            keys,
            values,
            _replace(self.key_scales, at, kv.key_scales),
            _replace(self.value_scales, at, kv.value_scales),
        )

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]


def _replace(items: tuple[jax.Array, ...], index: int, item: jax.Array) -> tuple[jax.Array, ...]:
    return (*items[:index], item, *items[index + 1 :])


def pool_shapes(layout: KVLayout, num_pages: int, page_size: int, dtype: np.dtype) -> KVPool:
    """The pool as ShapeDtypeStructs: for planning and ahead-of-time compilation.

    dtype: of keys and values; int8 brings scales.
    """
    pages, scales = [], []
    for array in layout.arrays:
        shape = (num_pages, page_size, array.num_kv_heads)
        pages.append(jax.ShapeDtypeStruct((*shape, array.head_dim), dtype))
        if dtype == np.int8:
            scales.append(jax.ShapeDtypeStruct(shape, np.float32))
    return KVPool(layout.array_of_layer, tuple(pages), tuple(pages), tuple(scales), tuple(scales))


def make_pool(
    layout: KVLayout,
    num_pages: int,
    page_size: int,
    dtype: np.dtype,
    place: Callable[[KVPool], KVPool] | None = None,
    backend: str = "reference",
) -> KVPool:
    """Allocate a zeroed pool. Page 0 exists but is never handed out: padding points at it.

    place: gives the sharding of each array, for a pool of shapes; None: the default device.
    backend: whose zeros to take (see `pallas_kernels.zeros`).
    """
    shapes = pool_shapes(layout, num_pages, page_size, dtype)
    places = None if place is None else place(shapes)
    make = jax.jit(partial(_zeros, shapes, backend), out_shardings=places)
    return make()


def _zeros(shapes: KVPool, backend: str) -> KVPool:
    return jax.tree.map(partial(zeros, backend=backend), shapes)
