"""What a thread block of the decode kernel works on: its arrays, its keys, and how they come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.decode_layout import Layout


@dataclass(frozen=True)
class Refs:
    """The kernel's arrays; those that a call does not have are None."""

    page_table: Any  # int32 [B, P]
    query_lens: Any  # int32 [B]
    kv_lens: Any  # int32 [B]
    layer: Any  # int32 [1]
    q: Any  # [B * K * parts * groups * n, D]
    keys: Any  # [A * N * K * page, D]
    values: Any  # like keys, or 8-bit [A * N * K * D, page]
    key_scales: Any  # float32 [A * N * K, page] or None
    value_scales: Any
    marks: Any  # int32 [B * parts, groups, 2, n] or None
    sinks: Any  # float32 [K * parts, groups, n] or None
    outs: tuple[Any, ...]
    q_s: Any
    keys_s: Any  # [stages, keys, D]
    values_s: Any  # [stages, keys, D], or 8-bit [stages, pieces, D, piece]
    p_s: Any  # [groups, n, keys]
    out_s: Any  # [groups, n, 64]
    stats_s: Any  # [groups, 2, n]
    scales_s: Any  # [stages, 2, keys] or None
    marks_s: Any
    sinks_s: Any
    q_ready: Any  # [groups]
    keys_ready: Any  # [stages]
    values_ready: Any  # [stages]
    free: Any  # [stages], used between groups
    clean: Any  # used between groups


@dataclass(frozen=True)
class Span:
    """Keys of one thread block: `count` tiles from the piece `first` on; `end` pieces hold keys.

    low: the first position that any query of the row sees; own: that of the row's first query.
    """

    first: jax.Array
    count: jax.Array
    end: jax.Array
    low: jax.Array
    own: jax.Array
    kv_len: jax.Array

    def pages(self, plan: Layout, r: Refs, row: jax.Array, tile: jax.Array) -> list[jax.Array]:
        """Page ids of a tile's pieces. Loaded early: nothing else hides their latency."""
        of_piece = [(self.first + tile * plan.pieces + p) * plan.piece for p in range(plan.pieces)]
        last = jnp.int32(plan.table_width - 1)
        return [r.page_table[row, jnp.minimum(lax.div(x, plan.page), last)] for x in of_piece]


def scratch_of(plan: Layout) -> list[Any]:
    """Shared memory, in the order in which `operands_of` takes it."""
    tile, n, groups, D = plan.tile, plan.group_columns, plan.groups, plan.head_dim
    dtype, compute = plan.cache_dtype, plan.compute_dtype

    def operand(shape: tuple[int, ...], dtype: jnp.dtype, span: int = 128) -> Any:
        return mgpu.SMEM(shape, dtype, transforms=mgpu.swizzle_transforms(shape[-1], dtype, span))

    values = (tile.stages, plan.pieces, D, plan.piece) if plan.eight_bit else None
    p_span = plan.piece * compute.itemsize if plan.eight_bit else 128
    out_dtype = plan.out_dtype if plan.splits == 1 else jnp.dtype(jnp.float32)
    scratch = [
        operand((groups, n, D), compute),
        operand((tile.stages, tile.keys, D), dtype),
        operand(values or (tile.stages, tile.keys, D), dtype),
        operand((groups, n, tile.keys), compute, p_span),
        mgpu.SMEM((groups, n, 64), out_dtype),
        mgpu.SMEM((groups, 2, n), jnp.float32),
    ]
    if plan.scaled:
        scratch.append(mgpu.SMEM((tile.stages, 2, tile.keys), jnp.float32))
    if plan.width > 1:
        scratch.append(mgpu.SMEM((groups, 2, n), jnp.int32))
    if plan.sinks and plan.splits == 1:
        scratch.append(mgpu.SMEM((groups, n), jnp.float32))
    beside = 1 + (plan.width > 1) + (plan.sinks and plan.splits == 1)
    scratch.append(mgpu.Barrier(num_arrivals=beside, num_barriers=groups))
    with_keys = plan.pieces * (3 if plan.scaled else 1)
    scratch.append(mgpu.Barrier(num_arrivals=with_keys, num_barriers=tile.stages))
    scratch.append(mgpu.Barrier(num_arrivals=plan.pieces, num_barriers=tile.stages))
    if groups > 1:
        scratch.append(mgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages))
        scratch.append(mgpu.Barrier())
    return scratch


def operands_of(plan: Layout, refs: Sequence[Any]) -> Refs:
    """Names for the positional refs of a call."""
    rest = iter(refs)

    def take(count: int, present: bool = True) -> list[Any]:
        return [next(rest) if present else None for _ in range(count)]

    verify, sinks = plan.width > 1, plan.sinks and plan.splits == 1
    inputs = take(7) + take(2, plan.scaled) + take(1, verify) + take(1, sinks)
    outs = tuple(take(1 if plan.splits == 1 else 2))
    buffers = take(6) + take(1, plan.scaled) + take(1, verify) + take(1, sinks)
    barriers = take(3) + take(2, plan.groups > 1)
    named: list[Any] = [*inputs, outs, *buffers, *barriers]
    return Refs(*named)


def span_of(plan: Layout, r: Refs, row: jax.Array, split: jax.Array) -> Span:
    """What this thread block reads. A row without queries has no keys."""
    kv_len, queries = r.kv_lens[row], r.query_lens[row]
    own = kv_len - queries
    low = jnp.int32(0)
    if plan.window is not None:
        low = jnp.maximum(own - (plan.window - 1), 0)
    first = lax.div(low, jnp.int32(plan.piece))
    end = lax.div(kv_len + (plan.piece - 1), jnp.int32(plan.piece))
    end = jnp.where(queries > 0, end, first)
    tiles = lax.div(end - first + (plan.pieces - 1), jnp.int32(plan.pieces))
    least = max(1, plan.tile.min_keys // plan.tile.keys)
    each = jnp.maximum(lax.div(tiles + (plan.splits - 1), jnp.int32(plan.splits)), least)
    start = split * each
    count = jnp.clip(tiles - start, 0, each)
    return Span(first + start * plan.pieces, count, end, low, own, kv_len)


def start_tile(
    plan: Layout,
    r: Refs,
    span: Span,
    head: jax.Array,
    tile: jax.Array,
    pages: list[jax.Array],
) -> None:
    """Ask for a tile's pieces; one that holds no keys only arrives at the barriers."""
    slot = lax.rem(tile, jnp.int32(plan.tile.stages))
    for p, page in enumerate(pages):
        piece = span.first + tile * plan.pieces + p
        if plan.pieces == 1:
            _start_piece(plan, r, head, slot, piece, p, page)
            continue
        live = piece < span.end

        @mgpu.when(live)
        def _(p: int = p, page: jax.Array = page, piece: jax.Array = piece) -> None:
            _start_piece(plan, r, head, slot, piece, p, page)

        @mgpu.when(jnp.logical_not(live))
        def _() -> None:
            for _ in range(3 if plan.scaled else 1):
                mgpu.barrier_arrive(r.keys_ready.at[slot])
            mgpu.barrier_arrive(r.values_ready.at[slot])


def _start_piece(
    plan: Layout,
    r: Refs,
    head: jax.Array,
    slot: jax.Array,
    piece: jax.Array,
    p: int,
    page: jax.Array,
) -> None:
    kv_head = head if plan.parts == 1 else lax.div(head, jnp.int32(plan.parts))
    block = (r.layer[0] * plan.pages_per_layer + page) * plan.kv_heads + kv_head
    offset = lax.rem(piece * plan.piece, jnp.int32(plan.page))
    tokens = mgpu.ds(block * plan.page + offset, plan.piece)
    here, part = mgpu.ds(offset, plan.piece), mgpu.ds(p * plan.piece, plan.piece)
    mgpu.copy_gmem_to_smem(
        r.keys.at[tokens], r.keys_s.at[slot, part], r.keys_ready.at[slot], name="keys"
    )
    if plan.scaled:
        for i, scales in enumerate((r.key_scales, r.value_scales)):
            mgpu.copy_gmem_to_smem(
                scales.at[block, here],
                r.scales_s.at[slot, i, part],
                r.keys_ready.at[slot],
                name="scales",
            )
    if plan.eight_bit:
        source = r.values.at[mgpu.ds(block * plan.head_dim, plan.head_dim), here]
        target = r.values_s.at[slot, p]
    else:
        source, target = r.values.at[tokens], r.values_s.at[slot, part]
    mgpu.copy_gmem_to_smem(source, target, r.values_ready.at[slot], name="values")
