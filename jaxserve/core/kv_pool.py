"""The paged KV pool of the CPU and reference backends: one pair of arrays per layer.

Opaque to models: they hand it to `ops.attend` and take it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.kv_spec import KVSpec


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=[])
@dataclass(frozen=True)
class KVPool:
    """Per layer, keys and values [num_pages, page_size, num_kv_heads, head_dim]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]


def pool_shapes(spec: KVSpec, num_pages: int, page_size: int, dtype: np.dtype) -> KVPool:
    """The pool as ShapeDtypeStructs: for planning and ahead-of-time compilation."""
    shapes = []
    for layer in range(spec.num_layers):
        group = spec.groups[spec.group_of_layer(layer)]
        shape = (num_pages, page_size, group.num_kv_heads, group.head_dim)
        shapes.append(jax.ShapeDtypeStruct(shape, dtype))
    return KVPool(keys=tuple(shapes), values=tuple(shapes))


def make_pool(
    spec: KVSpec,
    num_pages: int,
    page_size: int,
    dtype: np.dtype,
    place: Callable[[KVPool], KVPool] | None = None,
) -> KVPool:
    """Allocate a zeroed pool. Page 0 exists but is never handed out: padding points at it.

    place: gives the sharding of each array, for a pool of shapes; None: the default device.
    """
    shapes = pool_shapes(spec, num_pages, page_size, dtype)
    if place is None:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.tree.map(
        lambda leaf, where: jnp.zeros(leaf.shape, leaf.dtype, device=where), shapes, place(shapes)
    )
