"""Decode and verify attention on Mosaic GPU: a few query tokens a row against all of its pages.

What costs time is reading keys and values once, so the kernel is built around that (Dao et al.,
Flash-Decoding, 2023; FlashInfer, arXiv:2501.01005): a row's keys are cut into splits, each thread
block takes one (row, KV head, split), and the parts are merged by their log-sum-exp in float32.
The tensor core wants 64 rows on its left and 8 on its right, so keys and values stand left and the
queries right: S^T [keys, n] = K Q^T and O^T [D, n] = V^T P^T, where n counts the query tokens of a
row times the query heads that share the KV head, padded to 8.

8-bit keys and values go through registers as the left operand, so no dequantised copy exists. A
key's scale multiplies its row of S^T, a value's scale its row of P^T. The running maximum is taken
over scores plus log2 of the value's scale: P^T times the scale then stays within [0, 1], which is
what lets fp8 use float16.

`decode_step.py` has the arithmetic of one step, `decode_tiles.py` the tile shapes with reasons.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.decode_layout import (
    Layout,
    column_marks,
    flat_pages,
    layout_of,
    pack_queries,
    pack_sinks,
)
from pallas_kernels.paged_attention.decode_refs import (
    Refs,
    Span,
    operands_of,
    scratch_of,
    span_of,
    start_tile,
)
from pallas_kernels.paged_attention.decode_step import finish, first_state, step
from pallas_kernels.paged_attention.decode_tiles import DecodeTile


def decode_attention(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    width: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    splits: int | None = None,
    tiles: DecodeTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of decode rows, `width` query tokens each, over the pages of their rows.

    q [B * width, H, D] bfloat16 or float16; key_pages [A, N, K, page, D] and value_pages of the
    same shape when 16-bit, value_pages [A, N, K, D, page] when int8 or float8_e4m3fn, with
    key_scales and value_scales float32 [A, N, K, page]; layer int32 [1] picks of A; page_table
    [B, P], query_lens and kv_lens [B] int32. Options as in `paged_attention`; tree_mask
    [B, width, width]. splits: into how many parts a row's keys are cut at most.

    Returns [B * width, H, D] in q's dtype, zero for padding. Every key and value page that a query
    may see is read once, rounded up to whole copies of min(page, tile) keys.
    Raises ValueError for shapes and dtypes that the kernel does not take.
    """
    plan = layout_of(
        q, key_pages, value_pages, page_table, width=width, scale=scale, window=window,
        softcap=softcap, sinks=sinks is not None, scaled=key_scales is not None, splits=splits,
        tile=tiles,
    )  # fmt: skip
    inputs = [page_table, query_lens, kv_lens, layer, flat_pages(pack_queries(q, plan))]
    inputs += [flat_pages(key_pages), flat_pages(value_pages)]
    if key_scales is not None and value_scales is not None:
        inputs += [x.reshape(-1, plan.page) for x in (key_scales, value_scales)]
    if plan.width > 1:
        inputs.append(column_marks(plan, query_lens, tree_mask))
    if sinks is not None and plan.splits == 1:
        inputs.append(pack_sinks(sinks, plan))
    outs = _kernel(plan, interpret)(*inputs)
    out = outs[0] if plan.splits == 1 else _merged(plan, outs[0], outs[1], sinks)
    return _unpacked(plan, out, query_lens).astype(q.dtype)


def _kernel(plan: Layout, interpret: bool) -> Callable[..., list[jax.Array]]:
    blocks, heads, columns = plan.rows, plan.kv_heads * plan.parts, plan.part_columns
    if plan.splits == 1:
        outs = [jax.ShapeDtypeStruct((blocks, heads, columns, plan.head_dim), plan.out_dtype)]
    else:
        parts = (plan.splits, blocks, heads)
        outs = [
            jax.ShapeDtypeStruct((*parts, columns, plan.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(
                (math.prod(parts) * plan.groups, 2, plan.group_columns), jnp.float32
            ),
        ]
    return mgpu.kernel(
        functools.partial(_decode_body, plan),
        interpret=interpret,
        out_type=outs,
        scratch_types=scratch_of(plan),
        grid=(plan.splits, blocks, heads),
        grid_names=("split", "row", "head"),
        num_threads=plan.groups,
        thread_name="group",
        compiler_params=mgpu.CompilerParams(approx_math=True),
        kernel_name="decode_attention",
    )


def _decode_body(plan: Layout, *refs: object) -> None:
    """One thread block: one split of one row's keys, for the queries of one KV head.

    Shared memory: `stages` tiles of keys and values, queries [n, D], P [n, keys], a float32 or
    output chunk [n, 64], scales. Group 0 starts the copies; each group of at most 64 query columns
    is a warpgroup with its own softmax.
    """
    r = operands_of(plan, refs)
    row, head = lax.axis_index("row"), lax.axis_index("head")
    group = lax.axis_index("group")
    span = span_of(plan, r, row, lax.axis_index("split"))
    _start(plan, r, span, row, head, group)
    mgpu.barrier_wait(r.q_ready.at[group])
    state = lax.fori_loop(
        0,
        span.count,
        lambda i, state: step(plan, r, span, row, head, group, i, state),
        first_state(plan),
    )
    finish(plan, r, span, row, head, group, state)


def _start(
    plan: Layout, r: Refs, span: Span, row: jax.Array, head: jax.Array, group: jax.Array
) -> None:
    """Each group asks for its queries, group 0 for the first tiles."""

    ready, n = r.q_ready.at[group], plan.group_columns
    first = ((row * plan.kv_heads * plan.parts + head) * plan.groups + group) * n
    mgpu.copy_gmem_to_smem(r.q.at[mgpu.ds(first, n)], r.q_s.at[group], ready, name="queries")
    if r.marks is not None:
        marks = r.marks.at[row * plan.parts + lax.rem(head, jnp.int32(plan.parts)), group]
        mgpu.copy_gmem_to_smem(marks, r.marks_s.at[group], ready, name="marks")
    if r.sinks is not None:
        mgpu.copy_gmem_to_smem(r.sinks.at[head, group], r.sinks_s.at[group], ready, name="sinks")

    @mgpu.when(group == 0)
    def _() -> None:
        for i in range(plan.tile.stages):
            tile = jnp.int32(i)

            @mgpu.when(tile < span.count)
            def _(tile: jax.Array = tile) -> None:
                start_tile(plan, r, span, head, tile, span.pages(plan, r, row, tile))


def _merged(plan: Layout, parts: jax.Array, stats: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Parts [splits, B, heads, n, D] of one softmax, and their maxima and sums, put together."""
    columns = plan.part_columns
    stats = stats.reshape(*parts.shape[:3], plan.groups, 2, plan.group_columns)
    maxima, sums = (
        stats[:, :, :, :, i].reshape(*parts.shape[:3], -1)[..., :columns] for i in range(2)
    )
    most = maxima.max(0)
    if sinks is not None:
        sink = pack_sinks(sinks, plan).reshape(parts.shape[2], -1)[:, :columns]
        most = jnp.maximum(most, sink)
    weights = jnp.exp2(maxima - most)
    total = (sums * weights).sum(0)
    if sinks is not None:
        total = total + jnp.exp2(sink - most)
    # A split without keys wrote no part: whatever lies there must not count.
    kept = jnp.where(sums[..., None] > 0, parts, 0) * weights[..., None]
    return kept.sum(0) / jnp.where(total == 0, 1, total)[..., None]


def _unpacked(plan: Layout, out: jax.Array, query_lens: jax.Array) -> jax.Array:
    """[B, K * parts, n, D] as [B * width, H, D], zero where a row has no such query."""
    B, K, W, G, D = plan.rows, plan.kv_heads, plan.width, plan.group_size, plan.head_dim
    out = out.reshape(B, K, -1, D)[:, :, : plan.columns]
    if W > 1:
        out = out.reshape(B, K, W, G, D).swapaxes(1, 2)
        real = jnp.arange(W) < query_lens[:, None]
        out = jnp.where(real[:, :, None, None, None], out, 0)
    return out.reshape(B * W, K * G, D)
