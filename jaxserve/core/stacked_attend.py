"""`Ops.attend` over a stacked pool: the Mosaic kernels of Hopper GPUs, or the same interpreted."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxserve.core.kv_layout import KVLayout
from jaxserve.core.kv_pool import KVPool, LayerKV, StackedPool
from jaxserve.core.step_batch import StepBatch
from pallas_kernels.kv_write.mosaic_gpu import write_kv_mosaic
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic

_AXIS = "model"  # of the mesh in mesh.py


@dataclass(frozen=True)
class StackedAttend:
    """Hashable by value, so equal engines share programs.

    num_devices: that a pool is split over, by KV head; each attends with the query heads of its
    own. interpret: on a CPU, slowly, with checks for races.
    """

    layout: KVLayout
    num_devices: int = 1
    interpret: bool = False

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv_pool: KVPool,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        tree_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPool]:
        """See `jaxserve.core.ops.Attend`."""
        assert isinstance(kv_pool, StackedPool)
        table = self.layout.table_of_layer[layer]
        stack, index = kv_pool.place_of_layer[layer]
        out, kv = _step(
            q,
            k,
            v,
            kv_pool.stack(stack),
            sinks,
            np.array([index], np.int32),
            batch.write_slot[table],
            batch.page_table[table],
            batch.query_starts,
            batch.query_lens,
            batch.kv_lens,
            tree_mask,
            devices=self.num_devices,
            interpret=self.interpret,
            decode_rows=batch.decode_rows,
            width=batch.width,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return out, kv_pool.with_stack(stack, kv)


# An inner jit: all layers of one shape share one trace and one lowering.
@partial(
    jax.jit,
    static_argnames=(
        "devices", "interpret", "decode_rows", "width", "scale", "window", "softcap",
    ),
)  # fmt: skip
def _step(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv: LayerKV,
    sinks: jax.Array | None,
    index: jax.Array,
    *rows: jax.Array | None,
    devices: int,
    interpret: bool,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, LayerKV]:
    """Each device works on the heads it has: no communication."""
    work = partial(
        _write_and_attend,
        interpret=interpret,
        decode_rows=decode_rows,
        width=width,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    splits = kv.keys.shape[2] % devices == 0
    heads = PartitionSpec(None, _AXIS) if splits else PartitionSpec()
    pool = PartitionSpec(None, None, _AXIS) if splits else PartitionSpec()
    own = PartitionSpec(_AXIS) if splits else PartitionSpec()
    everywhere = PartitionSpec()
    return jax.shard_map(
        work,
        mesh=_mesh(devices),
        in_specs=(heads, heads, heads, pool, own, everywhere, everywhere),
        out_specs=(heads, pool),
        check_vma=False,  # kernels do not say how their results vary
    )(q, k, v, kv, sinks, index, rows)


def _mesh(devices: int) -> AbstractMesh:
    """That of the program that is traced, which also says what GPU it is for, if it has one."""
    around = jax.sharding.get_abstract_mesh()
    if _AXIS in around.axis_names:
        return around
    return AbstractMesh(
        (devices,), (_AXIS,), axis_types=(AxisType.Auto,), abstract_device=around.abstract_device
    )


def _write_and_attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv: LayerKV,
    sinks: jax.Array | None,
    index: jax.Array,
    rows: tuple[jax.Array, ...],
    *,
    interpret: bool,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, LayerKV]:
    write_slot, page_table, query_starts, query_lens, kv_lens, tree_mask = rows
    if k is not None and v is not None:
        keys, values, key_scales, value_scales = kv
        kv = LayerKV(
            *write_kv_mosaic(
                keys, values, k, v, jnp.asarray(write_slot), index,
                key_scales=key_scales, value_scales=value_scales, interpret=interpret,
            )
        )  # fmt: skip
    out = paged_attention_mosaic(
        q, kv.keys, kv.values, index, page_table, query_starts, query_lens, kv_lens,
        decode_rows=decode_rows, width=width, scale=scale, window=window, softcap=softcap,
        sinks=sinks, tree_mask=tree_mask,
        key_scales=kv.key_scales, value_scales=kv.value_scales, interpret=interpret,
    )  # fmt: skip
    return out, kv
