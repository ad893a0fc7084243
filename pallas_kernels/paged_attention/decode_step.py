"""One step of the decode kernel, piece by piece: scores, softmax, values; and its output."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.decode_layout import LOG2_E, Layout
from pallas_kernels.paged_attention.decode_refs import Refs, Span, start_tile

# Masked scores lie far below the first maximum, so that exp2(masked - maximum) is exactly 0.
_MASKED = -1e30
_FIRST_MAX = -1e29
# log2 of a value's scale, at least: sums of 2^(score - maximum) then stay in float32.
_LEAST_SCALE = 2.0**-60

_WGMMA = mgpu.Layout.WGMMA
_BY_KEY = _WGMMA.reduce(1)
_BY_COLUMN = _WGMMA.reduce(0)

# Running maximum and sum [n] float32, and the pieces [64, n] of the weighted values.
State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


def first_state(plan: Layout) -> State:
    n = plan.group_columns
    maximum = mgpu.layout_cast(jnp.full((n,), _FIRST_MAX, jnp.float32), _BY_COLUMN)
    total = mgpu.layout_cast(jnp.zeros((n,), jnp.float32), _BY_COLUMN)
    values = tuple(
        mgpu.layout_cast(jnp.zeros((64, n), jnp.float32), _WGMMA) for _ in plan.value_chunks
    )
    return maximum, total, values


def step(
    plan: Layout,
    r: Refs,
    span: Span,
    row: jax.Array,
    head: jax.Array,
    group: jax.Array,
    i: jax.Array,
    state: State,
) -> State:
    """Take tile i into the running softmax, and ask for the tile that will lie in its slot."""
    maximum, total, values = state
    slot = lax.rem(i, jnp.int32(plan.tile.stages))
    coming = i + plan.tile.stages
    pages = span.pages(plan, r, row, coming)
    mgpu.barrier_wait(r.keys_ready.at[slot])
    scores = _scores(plan, r, slot, group)
    start = (span.first + i * plan.pieces) * plan.piece
    visible = _visible(plan, r, span, start, group)
    scores = jnp.where(visible, scores, _MASKED)
    peaks, scales = scores, None
    if plan.scaled:
        scales = mgpu.load(r.scales_s.at[slot, 1], layout=_BY_KEY)
        logs = jnp.log2(jnp.maximum(scales, _LEAST_SCALE))
        shifted = scores + lax.broadcast_in_dim(logs, scores.shape, [0])
        peaks = jnp.where(visible, shifted, _MASKED)
    new_maximum = jnp.maximum(maximum, peaks.max(axis=0))
    keep = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [1]))
    total = total * keep + weights.sum(axis=0)
    if scales is not None:
        of_key = lax.broadcast_in_dim(scales, scores.shape, [0])
        weights = weights * jnp.where(visible, of_key, 0.0)
    r.p_s.at[group].T[...] = mgpu.layout_cast(
        weights.astype(plan.compute_dtype), mgpu.Layout.WGMMA_TRANSPOSED
    )
    mgpu.commit_smem()
    mgpu.barrier_wait(r.values_ready.at[slot])
    if plan.cache_dtype != jnp.int8:
        _clear_unseen_values(plan, r, span, slot, start, group)
    scaled = tuple(x * lax.broadcast_in_dim(keep, x.shape, [1]) for x in values)
    values = _add_values(plan, r, slot, group, scaled)
    mgpu.commit_smem()
    if plan.groups > 1:
        mgpu.barrier_arrive(r.free.at[slot])

    @mgpu.when(group == 0)
    def _() -> None:
        if plan.groups > 1:
            mgpu.barrier_wait(r.free.at[slot])

        @mgpu.when(coming < span.count)
        def _() -> None:
            start_tile(plan, r, span, head, coming, pages)

    return new_maximum, total, values


def _scores(plan: Layout, r: Refs, slot: jax.Array, group: jax.Array) -> jax.Array:
    """S^T [keys, n] in powers of two."""
    shape = (plan.tile.keys, plan.group_columns)
    keys, queries = r.keys_s.at[slot], r.q_s.at[group]
    if plan.eight_bit:

        def multiply(acc: Any) -> None:
            for at, width in plan.key_chunks:
                chunk, part = keys, queries
                if len(plan.key_chunks) > 1:
                    chunk, part = (x.at[:, mgpu.ds(at, width)] for x in (keys, queries))
                mgpu.wgmma(acc, _widened(plan, chunk, width), part.T)
                _spare_registers(plan)

        scores = mgpu.multiplied(shape, multiply)
    else:
        scores = mgpu.multiplied(shape, lambda acc: mgpu.wgmma(acc, keys, queries.T))
    if plan.scaled:
        scales = mgpu.load(r.scales_s.at[slot, 0], layout=_BY_KEY)
        scores = scores * lax.broadcast_in_dim(scales, shape, [0])
    if plan.softcap is None:
        return scores * (plan.scale * LOG2_E)
    # tanh x = 1 - 2 / (1 + e^2x), which the approximate exponential keeps exact enough.
    doubled = jnp.exp2(scores * (2 * LOG2_E * plan.scale / plan.softcap))
    return (1.0 - 2.0 / (1.0 + doubled)) * (plan.softcap * LOG2_E)


def _widened(plan: Layout, ref: Any, width: int) -> jax.Array:
    """8-bit numbers [64 or 128, width] from shared memory as the left operand of a product."""
    if width % 32:
        return mgpu.load(ref, layout=_WGMMA, optimized=False).astype(plan.compute_dtype)
    packed = mgpu.load(ref, layout=mgpu.Layout.WGMMA_UPCAST_2X)
    return mgpu.layout_cast(packed, _WGMMA).astype(plan.compute_dtype)


def _spare_registers(plan: Layout) -> None:
    """Await a product before the next operand is loaded, where sums leave no room for both."""
    if plan.group_columns > 16:
        mgpu.wgmma_wait(0)


def _transposed(plan: Layout, values: Any, at: int) -> Any:
    """V^T [64, keys] of columns at to at + 64 of 16-bit values [keys, D], as a left operand.

    The tensor core reads transposed operands from memory in whole 128 bytes; a head_dim of 80 or
    96 is stored in less, and is turned around in registers.
    """
    if plan.head_dim == 64:
        return values.T
    chunk = values.at[:, mgpu.ds(at, 64)].T
    if plan.head_dim % 64 == 0:
        return chunk
    held = mgpu.load(chunk, layout=mgpu.Layout.WGMMA_TRANSPOSED)
    return mgpu.layout_cast(held, _WGMMA)


def _visible(plan: Layout, r: Refs, span: Span, start: jax.Array, group: jax.Array) -> jax.Array:
    """Which query sees which key of the tile at position `start`, bool [keys, n]."""
    shape = (plan.tile.keys, plan.group_columns)
    from_own = mgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + (start - span.own)
    if plan.width == 1:
        visible = from_own <= 0
        if plan.window is not None:
            visible &= from_own > -plan.window
        return visible
    words, reach = (
        lax.broadcast_in_dim(mgpu.load(r.marks_s.at[group, i], layout=_BY_COLUMN), shape, [1])
        for i in range(2)
    )
    bit = jnp.clip(from_own, 0, 31)
    sees = (lax.shift_right_logical(words, bit) & 1) - 1
    before = from_own < 0
    return jnp.where(before, from_own - reach, sees) >= 0


def _clear_unseen_values(
    plan: Layout,
    r: Refs,
    span: Span,
    slot: jax.Array,
    start: jax.Array,
    group: jax.Array,
) -> None:
    """Zeros for values that no query sees: they may be NaN, and 0 * NaN is not 0."""

    def clear(ref: Any, axis: int, offset: int, layout: Any, optimized: bool) -> None:
        at = mgpu.broadcasted_iota(jnp.int32, ref.shape, axis, layout=_WGMMA) + (start + offset)
        seen = (at >= span.low) & (at < span.kv_len)
        held = mgpu.load(ref, layout=layout, optimized=optimized)
        if plan.eight_bit:  # no arithmetic on 8 bits; float16 holds them all
            held = mgpu.layout_cast(held, _WGMMA).astype(plan.compute_dtype)
        cleared = jnp.where(seen, held, jnp.zeros_like(held)).astype(ref.dtype)
        ref[...] = cleared

    @mgpu.when((group == 0) & ((start < span.low) | (start + plan.tile.keys > span.kv_len)))
    def _() -> None:
        for at in plan.value_chunks:
            if not plan.eight_bit:
                clear(r.values_s.at[slot, :, mgpu.ds(at, 64)], 0, 0, _WGMMA, True)
                continue
            for p in range(plan.pieces):
                narrow = plan.piece % 32 != 0
                layout = _WGMMA if narrow else mgpu.Layout.WGMMA_UPCAST_2X
                ref = r.values_s.at[slot, p, mgpu.ds(at, 64)]
                clear(ref, 1, p * plan.piece, layout, not narrow)
        mgpu.commit_smem()

    if plan.groups > 1:

        @mgpu.when(group == 0)
        def _() -> None:
            mgpu.barrier_arrive(r.clean)

        mgpu.barrier_wait(r.clean)


def _add_values(
    plan: Layout,
    r: Refs,
    slot: jax.Array,
    group: jax.Array,
    values: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """values + V^T P^T, piece of head_dim by piece."""
    weights = r.p_s.at[group]

    def multiply(accs: tuple[Any, ...]) -> None:
        for acc, at in zip(accs, plan.value_chunks, strict=True):
            if not plan.eight_bit:
                mgpu.wgmma(acc, _transposed(plan, r.values_s.at[slot], at), weights.T)
                if plan.head_dim % 64:
                    _spare_registers(plan)
                continue
            for p in range(plan.pieces):
                chunk = r.values_s.at[slot, p, mgpu.ds(at, 64)]
                part = weights
                if plan.pieces > 1:
                    part = weights.at[:, mgpu.ds(p * plan.piece, plan.piece)]
                mgpu.wgmma(acc, _widened(plan, chunk, plan.piece), part.T)
                _spare_registers(plan)

    return mgpu.accumulate(values, multiply)


def finish(
    plan: Layout,
    r: Refs,
    span: Span,
    row: jax.Array,
    head: jax.Array,
    group: jax.Array,
    state: State,
) -> None:
    """Write the output, or this split's part of it with its maximum and sum.

    A split without keys writes no part: its sum is zero.
    """
    maximum, total, values = state
    if plan.splits > 1:
        split = lax.axis_index("split")
        stats = r.stats_s.at[group]
        stats[0], stats[1] = maximum, total
        mgpu.commit_smem()

        @mgpu.when(span.count > 0)
        def _() -> None:
            _write(plan, r.outs[0].at[split, row, head], r.out_s, group, values)

        block = (split * plan.rows + row) * plan.kv_heads * plan.parts + head
        mgpu.copy_smem_to_gmem(stats, r.outs[1].at[block * plan.groups + group])
        mgpu.wait_smem_to_gmem(0)
        return
    if r.sinks_s is not None:
        sink = mgpu.load(r.sinks_s.at[group], layout=_BY_COLUMN)
        most = jnp.maximum(maximum, sink)
        keep = jnp.exp2(maximum - most)
        total = total * keep + jnp.exp2(sink - most)
    else:
        keep = jnp.ones_like(total)
    factor = keep / jnp.where(total == 0, 1.0, total)
    values = tuple(x * lax.broadcast_in_dim(factor, x.shape, [1]) for x in values)
    _write(plan, r.outs[0].at[row, head], r.out_s, group, values)


def _write(
    plan: Layout, out: Any, out_s: Any, group: jax.Array, values: Sequence[jax.Array]
) -> None:
    """Pieces [64, n] of O^T to out [columns, D], through a buffer of one piece."""
    buffer = out_s.at[group]
    for at, x in zip(plan.value_chunks, values, strict=True):
        buffer.T[...] = mgpu.layout_cast(x.astype(out_s.dtype), mgpu.Layout.WGMMA_TRANSPOSED)
        mgpu.commit_smem()
        for g in range(plan.groups):
            first = g * plan.group_columns
            rows = min(plan.group_columns, plan.part_columns - first)

            @mgpu.when(group == g)
            def _(g: int = g, first: int = first, rows: int = rows, at: int = at) -> None:
                mgpu.copy_smem_to_gmem(
                    out_s.at[g, mgpu.ds(0, rows)], out.at[mgpu.ds(first, rows), mgpu.ds(at, 64)]
                )

        mgpu.wait_smem_to_gmem(0)
