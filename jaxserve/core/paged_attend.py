"""`Ops.attend` over a pool of separate arrays, on the backends reference and cpu."""

from dataclasses import dataclass
from functools import partial

import jax

from jaxserve.core.kv_layout import KVLayout
from jaxserve.core.kv_pool import KVPool, LayerKV, SeparatePool
from jaxserve.core.step_batch import StepBatch
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cpu import paged_attention_cpu


@dataclass(frozen=True)
class PagedAttend:
    """Hashable by value, so equal engines share programs."""

    layout: KVLayout
    backend: str

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
        assert isinstance(kv_pool, SeparatePool)
        table = self.layout.table_of_layer[layer]
        step = _native_step if self.backend == "cpu" else _reference_step
        out, kv = step(
            q,
            k,
            v,
            kv_pool.layer(layer),
            batch.write_slot[table],
            batch.page_table[table],
            batch.query_starts,
            batch.query_lens,
            batch.kv_lens,
            sinks,
            tree_mask,
            decode_rows=batch.decode_rows,
            width=batch.width,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return out, kv_pool.with_layer(layer, kv)


_STATIC = ("decode_rows", "width", "scale", "window", "softcap")


# An inner jit: all layers of one shape share one trace and one lowering.
@partial(jax.jit, static_argnames=_STATIC)
def _reference_step(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv: LayerKV,
    write_slot: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, LayerKV]:
    if k is not None and v is not None:
        keys, values, key_scales, value_scales = kv
        pages = write_kv(
            keys, values, k, v, write_slot, key_scales=key_scales, value_scales=value_scales
        )
        kv = LayerKV(*pages)
    out = paged_attention(
        q, kv.keys, kv.values, page_table, query_starts, query_lens, kv_lens,
        decode_rows=decode_rows, width=width, scale=scale, window=window, softcap=softcap,
        sinks=sinks, tree_mask=tree_mask,
        key_scales=kv.key_scales, value_scales=kv.value_scales,
    )  # fmt: skip
    return out, kv


@partial(jax.jit, static_argnames=_STATIC)
def _native_step(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv: LayerKV,
    write_slot: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, LayerKV]:
    out, *pages = paged_attention_cpu(
        q, k, v, *kv, write_slot, page_table, query_starts, query_lens, kv_lens, sinks, tree_mask,
        decode_rows=decode_rows, width=width, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
    return out, LayerKV(*pages)
