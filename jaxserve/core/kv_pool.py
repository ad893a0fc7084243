"""The paged KV pool of the CPU and reference backends: one pair of arrays per layer.

Opaque to models: they hand it to `ops.attend` and take it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.core.kv_spec import KVSpec
from pallas_kernels.zeros import zeros


class LayerKV(NamedTuple):
    """One layer's part of the pool; the scales are None unless it is kept in int8."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales"],
    meta_fields=[],
)
@dataclass(frozen=True)
class KVPool:
    """Per layer, keys and values [num_pages, page_size, num_kv_heads, head_dim].

    Kept in int8, a number stands for itself times the scale of its token and head: key_scales and
    value_scales hold float32 [num_pages, page_size, num_kv_heads] per layer, else nothing.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()

    def layer(self, index: int) -> LayerKV:
        """The arrays of one layer."""
        if not self.key_scales:
            return LayerKV(self.keys[index], self.values[index])
        return LayerKV(
            self.keys[index], self.values[index], self.key_scales[index], self.value_scales[index]
        )

    def with_layer(self, index: int, kv: LayerKV) -> "KVPool":
        """The pool with one layer's arrays replaced."""
        keys, values = _replace(self.keys, index, kv.keys), _replace(self.values, index, kv.values)
        if kv.key_scales is None or kv.value_scales is None:
            return KVPool(keys, values)
        return KVPool(
            keys,
            values,
            _replace(self.key_scales, index, kv.key_scales),
            _replace(self.value_scales, index, kv.value_scales),
        )

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]


def _replace(items: tuple[jax.Array, ...], index: int, item: jax.Array) -> tuple[jax.Array, ...]:
    return (*items[:index], item, *items[index + 1 :])


def pool_shapes(spec: KVSpec, num_pages: int, page_size: int, dtype: np.dtype) -> KVPool:
    """The pool as ShapeDtypeStructs: for planning and ahead-of-time compilation.

    dtype: of keys and values; int8 brings scales.
    """
    pages, scales = [], []
    for layer in range(spec.num_layers):
        group = spec.groups[spec.group_of_layer(layer)]
        shape = (num_pages, page_size, group.num_kv_heads)
        pages.append(jax.ShapeDtypeStruct((*shape, group.head_dim), dtype))
        if dtype == np.int8:
            scales.append(jax.ShapeDtypeStruct(shape, np.float32))
    return KVPool(tuple(pages), tuple(pages), tuple(scales), tuple(scales))


def make_pool(
    spec: KVSpec,
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
    shapes = pool_shapes(spec, num_pages, page_size, dtype)
    places = None if place is None else place(shapes)
    make = jax.jit(partial(_zeros, shapes, backend), out_shardings=places)
    return make()


def _zeros(shapes: KVPool, backend: str) -> KVPool:
    return jax.tree.map(partial(zeros, backend=backend), shapes)
