"""Where arrays live: a mesh with one axis, of one device unless told otherwise.

Every parameter, the pool and the sampling state carry a sharding from the start, so more devices
change no other code: XLA inserts the communication (GSPMD, arXiv:2105.04663).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.core.kv_pool import KVPool
from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows

MODEL_AXIS = "model"
# Parameter axes that are split over devices; all others are copied to each.
_SPLIT = frozenset({"vocab", "heads", "kv_heads", "qkv", "gate_up", "mlp"})


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the given devices, or over the first one."""
    return Mesh(np.array(devices or jax.devices()[:1]), (MODEL_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """Split the first axis whose name says so and whose size divides evenly."""
    for index, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis in _SPLIT and size % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * index, MODEL_AXIS))
    return replicated(mesh)


def place_params(mesh: Mesh, params: Any, specs: Any) -> Any:
    """The parameter tree with every leaf where its spec (a tree of the same form) puts it."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_packed)
    placed = [
        jax.device_put(leaf, _leaf_sharding(mesh, leaf, spec.axes))
        for leaf, spec in zip(leaves, treedef.flatten_up_to(specs), strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray | StackedRows)


def _leaf_sharding(mesh: Mesh, leaf: Any, axes: tuple[str | None, ...]) -> NamedSharding:
    """Packed matrices are copied to each device: the native kernels that read them do not split."""
    return replicated(mesh) if _is_packed(leaf) else param_sharding(mesh, leaf.shape, axes)


def pool_shardings(mesh: Mesh, pool: KVPool) -> KVPool:
    """Of each array, and of pages taken out of them: split by KV head, which is axis 2 of all of
    them, whatever the pool's form. Features have no heads and are copied to each device."""

    def sharding(pages: Any) -> NamedSharding:
        if pages.shape[2] % mesh.size:
            return replicated(mesh)
        return NamedSharding(mesh, PartitionSpec(None, None, MODEL_AXIS))

    places: KVPool = jax.tree.map(sharding, pool)
    return places if pool.features is None else replace(places, features=replicated(mesh))
