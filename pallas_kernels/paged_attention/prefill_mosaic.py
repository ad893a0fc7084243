"""Paged attention of prefill chunks on Hopper: ragged rows, cached prefix, causal.

A thread block takes one tile of the work list (prefill_plan.py): 128 query rows, tokens times the
heads that share a KV head. One warpgroup loads (prefill_load.py); two compute, 64 rows each, in
the manner of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): scores and weighted values by
wgmma, softmax online in float32, while one warpgroup multiplies the other exponentiates.

Shared memory: queries [2, 64, D] (the output takes their place), rings of `stages` tiles of keys
[keys, D] and values ([keys, D]; [D, keys] when they come from 8-bit pages), and of `staged` tiles
of 8-bit codes with their scales; see prefill_tiles.py for the sizes.

Bytes: a tile reads its queries once, and of keys and values the pages of its row in
[first visible key, last query's position], widened to whole tiles of keys; it writes its output
once. Nothing else moves.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.prefill_load import Loader, PageTiles, Pool
from pallas_kernels.paged_attention.prefill_plan import (
    TOKEN_BLOCK,
    WARPGROUP_ROWS,
    Packing,
    Run,
    Work,
    packing,
    work_list,
)
from pallas_kernels.paged_attention.prefill_tiles import PrefillTile, prefill_tile

_LOG2E = math.log2(math.e)
# Masked scores lie far below the first maximum: exp2(masked - maximum) is 0 in every tile.
_MASKED = -1e30
_FIRST_MAXIMUM = -1e29
_COMPUTE = 2  # warpgroups
_ROWS = mgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class _Kernel:
    """What is fixed when the kernel is compiled."""

    packing: Packing
    pages: PageTiles
    heads: int
    group: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool

    @property
    def tile(self) -> PrefillTile:
        return self.pages.tile

    @property
    def head_dim(self) -> int:
        return self.pages.head_dim


def prefill_attention(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    tiles: PrefillTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of rows of queries over the pages of layer `layer`.

    q [T, H, D] bfloat16 or float16; row r owns q[query_starts[r] : query_starts[r] +
    query_lens[r]], rows in ascending order; query_lens, kv_lens [R], query i of a row standing at
    position kv_lens - query_lens + i. key_pages [A, N, K, page, D] and value_pages alike in q's
    dtype, or both int8 or float8_e4m3fn, then value_pages [A, N, K, D, page] and scales float32
    [A, N, K, page]. layer int32 [1]; page_table [R, P]; sinks [H]. `scale`, `window`, `softcap` and
    `sinks` mean what they mean in `paged_attention`.

    Returns [T, H, D], zero where no row owns the token. Pages that the rows do not own, and slots
    past kv_lens, change no bit of it. Raises ValueError for shapes that the kernel does not take.
    """
    T, H, D = q.shape
    K, page_size = key_pages.shape[2], key_pages.shape[3]
    quantized = key_pages.dtype.itemsize == 1
    _check(q, key_pages, value_pages, key_scales, value_scales)
    tile = tiles or prefill_tile(D, quantized)
    packed = packing(H // K, T)
    kernel = _Kernel(
        packing=packed,
        pages=PageTiles(tile, D, page_size, q.dtype, key_pages.dtype),
        heads=H,
        group=H // K,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks is not None,
    )
    work = work_list(
        query_starts,
        query_lens,
        kv_lens,
        num_tokens=T,
        tile_tokens=packed.tokens,
        tile_keys=tile.keys,
        window=window,
    )
    # Copies take tokens in eights, and must not be larger than what they copy from.
    if short := max(packed.tokens - T, -T % TOKEN_BLOCK):
        q = jnp.pad(q, ((0, short), (0, 0), (0, 0)))
    operands = [work, page_table.astype(jnp.int32), layer, q, key_pages, value_pages]
    if quantized:
        operands += [key_scales, value_scales]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32))

    def prefill_attention(*refs: Any) -> None:  # by this name profilers and compilers know it
        _body(kernel, refs)

    call = mgpu.kernel(
        prefill_attention,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(work.shape[0], H // packed.heads),
        grid_names=("tile", "heads"),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # four neighbouring threads hold a row of scores
        ),
        interpret=interpret,
    )
    return call(*operands)[:T]


def _check(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
) -> None:
    _, H, D = q.shape
    *_, K, page_size, page_dim = key_pages.shape
    quantized = key_pages.dtype.itemsize == 1
    turned = (*key_pages.shape[:3], page_dim, page_size)
    if value_pages.shape != (turned if quantized else key_pages.shape) or page_dim != D or H % K:
        raise ValueError(
            f"queries {q.shape} do not fit pages {key_pages.shape} and {value_pages.shape}: "
            "head_dim must agree, query heads be a multiple of KV heads, 8-bit values be transposed"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16) or D % 16 or D > 256:
        raise ValueError(
            f"queries of {q.dtype}{q.shape}: the kernel takes bfloat16 and float16 with a head_dim "
            "that is a multiple of 16 up to 256"
        )
    if page_size not in (16, 32, 64, 128):
        raise ValueError(f"pages of {page_size} tokens: the kernel takes 16, 32, 64 or 128")
    if quantized != (key_scales is not None) or quantized != (value_scales is not None):
        raise ValueError(f"{key_pages.dtype} pages with or without scales: 8-bit pages need both")
    if not quantized and key_pages.dtype != q.dtype:
        raise ValueError(f"queries of {q.dtype} do not fit pages of {key_pages.dtype}")


def _body(kernel: _Kernel, refs: tuple[Any, ...]) -> None:
    """One thread block: refs are the operands of `prefill_attention`'s call, then the output."""
    D, dtype = kernel.head_dim, kernel.pages.dtype
    # Rows one by one, at multiples of 128 bytes, for tiles that must not write whole runs. They
    # take the place of the queries, and of those of the same warpgroup only: the other one may
    # not be done with its own.
    pitch = -(-D // 64) * 64
    lines = mgpu.SMEM(
        (_COMPUTE, WARPGROUP_ROWS, pitch),
        dtype,
        transforms=mgpu.swizzle_transforms(D, dtype, rows=1),
    )
    height = -(-WARPGROUP_ROWS * pitch // (D * TOKEN_BLOCK)) * TOKEN_BLOCK
    queries = mgpu.SMEM((_COMPUTE, height, D), dtype, transforms=mgpu.swizzle_transforms(D, dtype))
    mgpu.run_scoped(
        functools.partial(_block, kernel, refs),
        mgpu.RefUnion(queries, lines),
        mgpu.Barrier(num_arrivals=len(kernel.packing.runs)),
        mgpu.Barrier(num_arrivals=_COMPUTE),
        kernel.pages.ring(),
        collective_axes="warpgroup",
    )


def _block(
    kernel: _Kernel, refs: tuple[Any, ...], rows: Any, loaded: Any, turn: Any, ring: dict[str, Any]
) -> None:
    table, page_table, layer, q, key_pages, value_pages, *rest, out = refs
    sinks = rest.pop() if kernel.sinks else None
    pool = Pool(layer, page_table, key_pages, value_pages, *(rest or (None, None)))
    queries, _ = rows
    tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
    work = Work(*(table[tile, i] for i in range(len(Work._fields))))
    heads = kernel.packing.heads
    first_head = lax.axis_index("heads") * heads
    kv_head = lax.div(first_head, jnp.int32(kernel.group))

    @mgpu.when((work.span > 0) & (warpgroup == _COMPUTE))
    def _() -> None:
        mgpu.set_max_registers(kernel.tile.load_registers, action="decrease")

        @mgpu.when(work.end > work.first)
        def _() -> None:
            for run in kernel.packing.runs:
                token = mgpu.ds(_token(work, run), run.tokens)
                target = queries.at[run.warpgroup, mgpu.ds(run.row, run.tokens)]
                source = q.at[token, first_head + run.head]
                mgpu.copy_gmem_to_smem(source, target, loaded, name="q")
            Loader(kernel.pages, pool, ring, work, kv_head).run()

    @mgpu.when((work.span > 0) & (warpgroup < _COMPUTE))
    def _() -> None:
        mgpu.set_max_registers(kernel.tile.compute_registers, action="increase")

        @mgpu.when(work.end > work.first)
        def _() -> None:
            mgpu.barrier_wait(loaded)

        attend = _Attend(kernel, ring, turn, work, warpgroup)
        own = queries.at[warpgroup, mgpu.ds(0, WARPGROUP_ROWS)]
        weighted = attend.run(own, sinks, first_head)
        _write(kernel, work, warpgroup, first_head, weighted.astype(out.dtype), rows, out)


class _Attend:
    """A compute warpgroup: 64 query rows over the tile's keys."""

    def __init__(
        self, kernel: _Kernel, ring: dict[str, Any], turn: Any, work: Work, warpgroup: jax.Array
    ):
        self.kernel, self.ring, self.turn, self.work = kernel, ring, turn, work
        self.warpgroup = warpgroup
        row = warpgroup * WARPGROUP_ROWS + _iota(WARPGROUP_ROWS)
        tokens = jnp.int32(kernel.packing.tokens)
        self.head = lax.div(row, tokens)
        self.token = lax.rem(row, tokens)
        self.position = work.position + self.token
        ranges = [kernel.packing.tokens_of(w) for w in range(_COMPUTE)]
        first, end = (
            jnp.where(warpgroup == 0, jnp.int32(a), jnp.int32(b))
            for a, b in zip(*ranges, strict=True)
        )
        # Of the row's tokens, those of this warpgroup, and the tiles of keys that they see.
        first, end = jnp.maximum(first, work.first), jnp.minimum(end, work.end)
        keys = jnp.int32(kernel.tile.keys)
        self.first_query, self.last_query = work.position + first, work.position + end - 1
        self.first_tile, self.end_tile = work.first_tile, lax.div(self.last_query, keys) + 1
        if kernel.window is not None:
            lowest = jnp.maximum(self.first_query - (kernel.window - 1), 0)
            self.first_tile = lax.div(lowest, keys)
        self.first_tile = jnp.where(first < end, self.first_tile, work.first_tile)
        self.end_tile = jnp.where(first < end, self.end_tile, work.first_tile)

    def run(self, queries: Any, sinks: Any, first_head: jax.Array) -> jax.Array:
        """The weighted mean of the values, float32 [64, D]; zeros past the tile's tokens."""
        kernel = self.kernel
        shape = (WARPGROUP_ROWS, kernel.head_dim)
        maximum = mgpu.layout_cast(
            jnp.full(shape[:1], _FIRST_MAXIMUM * self._unit, jnp.float32), _ROWS
        )
        total = mgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), _ROWS)
        weighted = mgpu.layout_cast(jnp.zeros(shape, jnp.float32), mgpu.Layout.WGMMA)
        carry = (maximum, total, weighted)
        step = functools.partial(self._step, queries)
        mgpu.when(self.warpgroup == 1)(self._pass_turn)
        lax.fori_loop(self.work.first_tile, self.first_tile, self._skip, None)
        carry = lax.fori_loop(self.first_tile, self.end_tile, step, carry)
        lax.fori_loop(self.end_tile, self.work.end_tile, self._skip, None)
        mgpu.when(self.warpgroup == 0)(self._pass_turn)
        maximum, total, weighted = carry
        if kernel.sinks:
            sink = self._sinks(sinks, first_head)
            highest = jnp.maximum(maximum, sink)
            keep = jnp.exp2(maximum - highest)
            total = total * keep + jnp.exp2(sink - highest)
        else:
            keep = jnp.ones_like(total)
        share = keep / jnp.where(total == 0, jnp.ones_like(total), total)
        weighted = weighted * lax.broadcast_in_dim(share, shape, [0])
        own = lax.broadcast_in_dim(self.token < self.work.end, shape, [0])
        return jnp.where(own, weighted, jnp.zeros_like(weighted))

    @property
    def _unit(self) -> float:
        """Scores times this are exponents of 2; the soft cap has its own scale."""
        return _LOG2E * (self.kernel.scale if self.kernel.softcap is None else 1.0)

    def _pass_turn(self) -> None:
        """Meet the other warpgroup: one multiplies next, the other exponentiates."""
        mgpu.barrier_arrive(self.turn)
        mgpu.barrier_wait(self.turn)

    def _slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(i - self.work.first_tile, jnp.int32(self.kernel.tile.stages))

    def _skip(self, i: jax.Array, _: None) -> None:
        """A tile of keys that the other warpgroup needs and this one does not."""
        slot = self._slot(i)
        for name in ("keys", "values"):
            mgpu.barrier_wait(self.ring[f"{name}_full"].at[slot])
            mgpu.barrier_arrive(self.ring[f"{name}_free"].at[slot])
            self._pass_turn()

    def _step(
        self, queries: Any, i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One tile of keys: scores, softmax, weighted values."""
        maximum, total, weighted = carry
        ring, slot, keys = self.ring, self._slot(i), self.kernel.tile.keys
        mgpu.barrier_wait(ring["keys_full"].at[slot])

        def multiply(acc: Any) -> jax.Array:
            mgpu.wgmma(acc, queries, ring["keys"].at[slot].T)
            self._pass_turn()
            return acc[...]

        scores = mgpu.run_scoped(multiply, mgpu.ACC((WARPGROUP_ROWS, keys), jnp.float32))
        mgpu.barrier_arrive(ring["keys_free"].at[slot])
        scores = self._masked(i * keys, self._capped(scores))
        highest = jnp.maximum(maximum, scores.max(axis=1) * self._unit)
        keep = jnp.exp2(maximum - highest)
        p = jnp.exp2(scores * self._unit - lax.broadcast_in_dim(highest, scores.shape, [0]))
        total = total * keep + p.sum(axis=1)
        weighted = weighted * lax.broadcast_in_dim(keep, weighted.shape, [0])
        p = p.astype(self.kernel.pages.dtype)
        mgpu.barrier_arrive(self.turn)
        mgpu.barrier_wait(ring["values_full"].at[slot])
        mgpu.barrier_wait(self.turn)
        values = ring["values"].at[slot]
        if self.kernel.pages.quantized:
            values = values.at[mgpu.ds(0, self.kernel.head_dim)].T
        weighted = mgpu.accumulate(weighted, lambda acc: mgpu.wgmma(acc, p, values))
        mgpu.barrier_arrive(ring["values_free"].at[slot])
        return highest, total, weighted

    def _capped(self, scores: jax.Array) -> jax.Array:
        cap = self.kernel.softcap
        return scores if cap is None else cap * jnp.tanh(scores * (self.kernel.scale / cap))

    def _masked(self, first_key: jax.Array, scores: jax.Array) -> jax.Array:
        """Scores of what the queries do not see made _MASKED, in tiles at the edges of it."""
        window, size = self.kernel.window, scores.shape[1]
        edge = first_key + (size - 1) > self.first_query
        if window is not None:
            edge |= first_key <= self.last_query - window

        def mask(scores: jax.Array) -> jax.Array:
            column = mgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=mgpu.Layout.WGMMA)
            last = lax.broadcast_in_dim(self.position - first_key, scores.shape, [0])
            visible = column <= last
            if window is not None:
                visible &= column > last - window
            return jnp.where(visible, scores, jnp.full_like(scores, _MASKED))

        return lax.cond(edge, mask, lambda scores: scores, scores)

    def _sinks(self, sinks: Any, first_head: jax.Array) -> jax.Array:
        """Of each row, as an exponent of 2."""
        sink = jnp.zeros_like(self.position, jnp.float32)
        for head in range(self.kernel.packing.heads):
            of_head = sinks[first_head + head] * _LOG2E
            sink = jnp.where(self.head == head, jnp.full_like(sink, of_head), sink)
        return sink


def _token(work: Work, run: Run) -> jax.Array:
    return (work.block + run.first_token // TOKEN_BLOCK) * TOKEN_BLOCK


def _iota(size: int) -> jax.Array:
    return mgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_ROWS)


def _write(
    kernel: _Kernel,
    work: Work,
    warpgroup: jax.Array,
    first_head: jax.Array,
    result: jax.Array,
    rows: Any,
    out: Any,
) -> None:
    """result [64, D] to the output, by runs of a head's tokens; by single rows where a run would
    reach into the tokens of the next tile."""
    packed, D = kernel.packing, kernel.head_dim
    queries, lines = rows

    whole = (work.first == 0) & (work.span == packed.tokens)

    @mgpu.when(whole)
    def _() -> None:
        queries.at[warpgroup, mgpu.ds(0, WARPGROUP_ROWS)][...] = result
        mgpu.commit_smem()
        for run in packed.runs:

            @mgpu.when(warpgroup == run.warpgroup)
            def _(run: Any = run) -> None:
                source = queries.at[run.warpgroup, mgpu.ds(run.row, run.tokens)]
                token = mgpu.ds(_token(work, run), run.tokens)
                mgpu.copy_smem_to_gmem(source, out.at[token, first_head + run.head])

    @mgpu.when(jnp.logical_not(whole))
    def _() -> None:
        mgpu.store(lines.at[warpgroup, :, mgpu.ds(0, D)], result)
        mgpu.commit_smem()

        def line(i: jax.Array, _: None) -> None:
            row = warpgroup * WARPGROUP_ROWS + i
            head, token = (f(row, jnp.int32(packed.tokens)) for f in (lax.div, lax.rem))

            @mgpu.when((head < packed.heads) & (token >= work.first) & (token < work.span))
            def _() -> None:
                source = lines.at[warpgroup, mgpu.ds(i, 1), mgpu.ds(0, D)]
                mgpu.copy_smem_to_gmem(
                    source, out.at[mgpu.ds(work.block * TOKEN_BLOCK + token, 1), first_head + head]
                )

        lax.fori_loop(0, WARPGROUP_ROWS, line, None)

    mgpu.wait_smem_to_gmem(0)
