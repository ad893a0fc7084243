"""latent_attention for Hopper: decode, verify and prefill by one kernel.

A thread block takes 64 rows of (token, head) of one batch row (plan.py) and a run of the row's
tokens. One warpgroup loads tiles of 64 tokens from their pages, two compute, each for half of the
value columns: its sums [64, 256] are 128 registers a thread and never leave them. Both multiply
the same 64 x 64 scores. That repeats 576 of the 1088 multiply-adds of a token and row, which the
tensor cores have to spare while the cache is read (64 rows a token need half of what they do in
that time), and spares what sharing the scores would cost: a trip of the probabilities through
shared memory, and two waits of the warpgroups for each other in every tile.

Softmax runs online in float32 (arXiv:1805.02867); where the tokens are split over several blocks,
each leaves a float32 sum and a log-sum-exp, merged afterwards.

Shared memory: queries [64, 576] 72 KiB; two tiles [64, 576] 144 KiB, which the float32 sums
[2, 64, 256] 128 KiB replace in the end. 8-bit caches: a ring of two tiles of codes, 72 KiB, and
one tile of them in bfloat16, 72 KiB, written once for all rows. Codes are exact in bfloat16; their
scales multiply the float32 scores and weights, so nothing is rounded that the cache does not round.

Bytes: a block reads its queries once and its tokens once, in whole pages up to the tile that
holds the last one seen. So a token is read once per 64 query rows: of 128 heads, twice; and split
rows read their queries once per split.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.latent_attention import check_scales, check_shapes
from pallas_kernels.latent_attention.plan import (
    COUNT,
    END,
    FIRST,
    POSITION,
    TABLE_ROW,
    decode_blocks,
    plan_decode,
    plan_prefill,
)
from pallas_kernels.latent_attention.tiles import KEYS, ROWS, pick_splits

_LOG2E = math.log2(math.e)
# Masked scores lie far below the first maximum: exp2(masked - maximum) is 0 in every tile.
_MASKED = -1e30
_FIRST_MAXIMUM = -1e29
_EMPTY = -1e30  # log-sum-exp of no tokens
_COMPUTE = 2  # warpgroups
_STAGES = 2
_SCALE_STAGES = 4  # a tile's scales are read after its codes, whose place is taken again meanwhile
_CHUNK = 64  # columns that a thread converts or clears at a time
_WGMMA = mgpu.Layout.WGMMA


@dataclass(frozen=True)
class _Kernel:
    """What is fixed when the kernel is compiled."""

    heads: int
    columns: int  # of a latent vector
    value_dim: int
    page_size: int
    splits: int
    scale: float
    pages_dtype: jnp.dtype
    out_dtype: jnp.dtype

    @property
    def half(self) -> int:
        """Value columns of a warpgroup."""
        return self.value_dim // _COMPUTE

    @property
    def unit(self) -> int:
        """Query rows moved at a time: every block has a whole number of them."""
        return math.gcd(self.heads, ROWS)

    @property
    def quantized(self) -> bool:
        return self.pages_dtype.itemsize == 1

    @property
    def copy_tokens(self) -> int:
        """Tokens that one copy brings: a page's, or a tile's of a longer page."""
        return min(self.page_size, KEYS)


def latent_attention_mosaic(
    q: jax.Array,
    latent_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    value_dim: int = 512,
    latent_scales: jax.Array | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`latent_attention`, with its arguments; q bfloat16, a multiple of 8 heads.

    splits: into how many blocks the tokens of decode rows are cut, instead of what the table in
    tiles.py says.
    """
    check_shapes(q, latent_pages, page_table, query_lens, decode_rows, width, value_dim)
    check_scales(latent_pages, latent_scales)
    _check_kernel(q, latent_pages, value_dim)
    T, H, C = q.shape
    P, page_size = page_table.shape[1], latent_pages.shape[2]
    each = decode_blocks(width, H)
    if splits is None:
        splits = pick_splits(decode_rows * each, P * page_size)
    kernel = functools.partial(
        _Kernel,
        heads=H,
        columns=C,
        value_dim=value_dim,
        page_size=page_size,
        scale=scale,
        pages_dtype=jnp.dtype(latent_pages.dtype),
        out_dtype=jnp.dtype(q.dtype),
    )
    pool = (layer, page_table, latent_pages, latent_scales)
    flat = q.reshape(T * H, C)
    out = jax.new_ref(jnp.zeros((T * H, value_dim), q.dtype))
    if decode_rows:
        rows = slice(0, decode_rows)
        plan = plan_decode(query_lens[rows], kv_lens[rows], width=width, heads=H)
        if splits == 1:
            _attend(kernel(splits=1), flat, pool, plan, out, interpret)
        else:
            merged = _merge(*_attend(kernel(splits=splits), flat, pool, plan, None, interpret))
            merged = merged.reshape(decode_rows, each * ROWS, value_dim)[:, : width * H]
            real = jnp.repeat(jnp.arange(width) < query_lens[rows, None], H, axis=1)
            merged = jnp.where(real[..., None], merged, 0).astype(q.dtype)
            split = decode_rows * width * H
            out[:split] = merged.reshape(split, value_dim)
    if decode_rows * width < T and decode_rows < query_lens.shape[0]:
        plan = plan_prefill(
            query_starts,
            query_lens,
            kv_lens,
            first_row=decode_rows,
            tokens=T - decode_rows * width,
            heads=H,
        )
        _attend(kernel(splits=1), flat, pool, plan, out, interpret)
    return jax.freeze(out).reshape(T, H, value_dim)


def _merge(sums: jax.Array, lse: jax.Array) -> jax.Array:
    """sums [splits, n, ROWS, V] float32, each divided by its weights, and their base-2 log-sum-exp
    [splits, n, ROWS]: all of them as one. A split without tokens left its sums unwritten."""
    weight = jnp.exp2(lse - lse.max(0))
    sums = jnp.where((lse > _EMPTY)[..., None], sums, 0)
    return (sums * weight[..., None]).sum(0) / weight.sum(0)[..., None]


def _attend(
    kernel: _Kernel,
    q: jax.Array,  # [T * H, C]
    pool: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    plan: jax.Array,  # [blocks, FIELDS]
    out: Any,  # ref [T * H, value_dim] written in place, or None for sums and log-sum-exps
    interpret: bool,
) -> tuple[jax.Array, ...]:
    layer, page_table, pages, scales = pool
    blocks = plan.shape[0]
    shapes = {}
    if out is None:
        sums = jax.ShapeDtypeStruct((kernel.splits, blocks, ROWS, kernel.value_dim), jnp.float32)
        shapes = {"out_type": (sums, jax.ShapeDtypeStruct(sums.shape[:3], jnp.float32))}
    operands = [q, plan, layer, page_table, pages]
    operands += [] if scales is None else [scales]
    operands += [] if out is None else [out]

    def latent_attention(*refs: Any, tokens: Any, scales: Any = None, **scratch: Any) -> None:
        inputs = 6 if kernel.quantized else 5
        memory = _Memory(*refs[:inputs])
        (ring, *whole), results = tokens
        shared = _Shared(
            ring=ring,
            whole=whole[0] if whole else None,
            scales=scales,
            results=results,
            **scratch,
        )
        _body(kernel, memory, shared, refs[inputs:])

    return mgpu.kernel(
        latent_attention,
        **{"out_type": (), **shapes},
        grid=(blocks, kernel.splits),
        grid_names=("block", "split"),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, jnp.float32 if out is None else out.dtype),
        compiler_params=mgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)


def _scratch(kernel: _Kernel, result: Any) -> dict[str, Any]:
    C, half = kernel.columns, kernel.half

    def tile(shape: tuple[int, ...], dtype: Any) -> Any:
        return mgpu.SMEM(shape, dtype, transforms=mgpu.swizzle_transforms(shape[-1], dtype))

    ring = tile((_STAGES, KEYS, C), kernel.pages_dtype)
    tokens = (ring, tile((1, KEYS, C), kernel.out_dtype)) if kernel.quantized else (ring,)
    copies = KEYS // kernel.copy_tokens
    scratch = {
        "queries": tile((1, ROWS, C), kernel.out_dtype),
        "arrived": mgpu.Barrier(num_barriers=ROWS // kernel.unit),
        "full": mgpu.Barrier(
            num_arrivals=copies * (3 if kernel.quantized else 1), num_barriers=_STAGES
        ),
        "empty": mgpu.Barrier(num_arrivals=_COMPUTE, num_barriers=_STAGES),
        # Where both compute warpgroups wait for each other.
        "met": mgpu.Barrier(num_arrivals=_COMPUTE),
        "tokens": mgpu.RefUnion(tokens, tile((_COMPUTE, ROWS, half), result)),
    }
    if kernel.quantized:
        scratch["scales"] = mgpu.SMEM((_SCALE_STAGES, 2, KEYS), jnp.float32)
    return scratch


@dataclass(frozen=True)
class _Memory:
    """Refs of what a kernel reads from the GPU's memory; scales only of 8-bit pages."""

    q: Any  # [T * H, C]
    plan: Any
    layer: Any
    page_table: Any
    pages: Any
    scales: Any = None


@dataclass(frozen=True)
class _Shared:
    """Refs of a thread block's shared memory and barriers; see `_scratch`."""

    queries: Any
    ring: Any
    whole: Any  # 8-bit pages: the tile at hand in bfloat16
    scales: Any  # and the ring's scales
    results: Any  # in place of ring and whole, in the end
    arrived: Any
    full: Any
    empty: Any
    met: Any

    def meet(self) -> None:
        """Both compute warpgroups wait for each other."""
        mgpu.barrier_arrive(self.met)
        mgpu.barrier_wait(self.met)


@dataclass(frozen=True)
class _Block:
    """What a thread block knows of its work: plan.py's fields, and its tiles of KEYS tokens."""

    first: jax.Array
    count: jax.Array
    table_row: jax.Array
    position: jax.Array
    end: jax.Array
    lo: jax.Array
    tiles: jax.Array

    def seen(self, first_key: jax.Array, columns: int) -> jax.Array:
        """[KEYS, columns]: whether any query sees the tile's token that begins at first_key."""
        key = mgpu.broadcasted_iota(jnp.int32, (KEYS, columns), 0, layout=_WGMMA)
        return key + first_key < self.end


def _body(kernel: _Kernel, memory: _Memory, shared: _Shared, outputs: tuple[Any, ...]) -> None:
    index, split = lax.axis_index("block"), lax.axis_index("split")
    first, count, table_row, position, end = (
        memory.plan[index, field] for field in (FIRST, COUNT, TABLE_ROW, POSITION, END)
    )
    tiles = lax.div(end + (KEYS - 1), KEYS)
    each = lax.div(tiles + (kernel.splits - 1), kernel.splits)
    lo = split * each
    block = _Block(first, count, table_row, position, end, lo, jnp.clip(tiles - lo, 0, each))
    warpgroup = lax.axis_index("warpgroup")

    @mgpu.when(warpgroup == _COMPUTE)
    def load() -> None:
        mgpu.set_max_registers(40, action="decrease")
        _load_queries(kernel, block, memory, shared)
        _load_tokens(kernel, block, memory, shared)

    @mgpu.when(warpgroup < _COMPUTE)
    def compute() -> None:
        mgpu.set_max_registers(232, action="increase")
        for unit in range(ROWS // kernel.unit):

            @mgpu.when((unit * kernel.unit < block.count) & (block.tiles > 0))
            def _(unit: int = unit) -> None:
                mgpu.barrier_wait(shared.arrived.at[unit])

        @mgpu.when(block.tiles > 0)
        def _() -> None:
            sums = _compute(kernel, block, warpgroup, shared)
            _write(kernel, block, warpgroup, sums, shared, outputs)

        if len(outputs) == 2:

            @mgpu.when((block.tiles == 0) & (warpgroup == 0))
            def _() -> None:
                lse = mgpu.layout_cast(jnp.full((ROWS,), _EMPTY, jnp.float32), _WGMMA.reduce(1))
                mgpu.store(outputs[1].at[split, index], lse)


def _row(kernel: _Kernel, block: _Block, unit: int) -> jax.Array:
    """Where a block's unit of query rows begins; copies must know that it is a whole tile's row."""
    return mgpu.multiple_of(block.first + unit * kernel.unit, kernel.unit)


def _load_queries(kernel: _Kernel, block: _Block, memory: _Memory, shared: _Shared) -> None:
    """The block's real rows: others may be another row's, or none at all."""
    for unit in range(ROWS // kernel.unit):

        @mgpu.when((unit * kernel.unit < block.count) & (block.tiles > 0))
        def _(unit: int = unit) -> None:
            rows = mgpu.ds(unit * kernel.unit, kernel.unit)
            source = memory.q.at[mgpu.ds(_row(kernel, block, unit), kernel.unit)]
            into, arrived = shared.queries.at[0, rows], shared.arrived.at[unit]
            mgpu.copy_gmem_to_smem(source, into, arrived, name="queries")


def _load_tokens(kernel: _Kernel, block: _Block, memory: _Memory, shared: _Shared) -> None:
    """Tile after tile of the row's pages; past its last page, that one again (masked later)."""
    size = kernel.copy_tokens
    last_page = lax.div(block.end - 1, kernel.page_size)

    def load(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, _STAGES)
        copies = []
        for c in range(KEYS // size):
            token = (block.lo + i) * KEYS + c * size
            page = jnp.minimum(lax.div(token, kernel.page_size), last_page)
            # Read before the wait, so that the page's number is there when its place is.
            number = memory.page_table[block.table_row, page]
            offset = mgpu.multiple_of(lax.rem(token, kernel.page_size), size)
            copies.append((c, number, offset))

        @mgpu.when(i >= _STAGES)
        def wait() -> None:
            mgpu.barrier_wait(shared.empty.at[slot])

        full = shared.full.at[slot]
        for c, number, offset in copies:
            into, source = mgpu.ds(c * size, size), mgpu.ds(offset, size)
            tokens = memory.pages.at[memory.layer[0], number, source]
            mgpu.copy_gmem_to_smem(tokens, shared.ring.at[slot, into], full, name="tokens")
            for which in range(2 if kernel.quantized else 0):
                scales = memory.scales.at[memory.layer[0], number, which, source]
                place = shared.scales.at[lax.rem(i, _SCALE_STAGES), which, into]
                mgpu.copy_gmem_to_smem(scales, place, full, name="scales")

    lax.fori_loop(0, block.tiles, load, None)


def _compute(
    kernel: _Kernel, block: _Block, warpgroup: jax.Array, shared: _Shared
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A warpgroup's sums [ROWS, half], and per row the largest score and the sum of weights."""
    own = _columns(kernel, warpgroup)
    factor = kernel.scale * _LOG2E

    def step(i: jax.Array, carry: tuple) -> tuple:
        acc, maximum, total = carry
        slot = lax.rem(i, _STAGES)
        first_key = (block.lo + i) * KEYS
        mgpu.barrier_wait(shared.full.at[slot])
        if kernel.quantized:
            tile = shared.whole.at[_first(i)]
            shared.meet()  # the other warpgroup may still read the last tile
            _spread(kernel, block, warpgroup, shared, slot, tile, first_key)
            mgpu.barrier_arrive(shared.empty.at[slot])
            shared.meet()
        else:
            tile = shared.ring.at[slot]
            _clear_tail(kernel, block, warpgroup, shared, tile, first_key)
        scores = _scores(kernel, shared, tile, i) * factor
        scores = _visible(kernel, block, scores, first_key)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        keep = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        total = total * keep + weights.sum(axis=1)
        if kernel.quantized:
            # Scales of tokens that none sees may be NaN; their weights are 0. (NaN of a token that
            # is seen has made its scores, and so all weights, NaN.)
            by = _scale(shared, i, 0)
            weights = weights * _to_rows(jnp.where(jnp.abs(by) < jnp.inf, by, jnp.zeros_like(by)))
        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
        acc = mgpu.accumulate(
            acc,
            lambda into: mgpu.wgmma(into, weights.astype(kernel.out_dtype), tile.at[:, own]),
        )
        if not kernel.quantized:
            mgpu.barrier_arrive(shared.empty.at[slot])
        return acc, new_maximum, total

    def rows(value: float) -> jax.Array:
        return mgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _WGMMA.reduce(1))

    acc = mgpu.layout_cast(jnp.zeros((ROWS, kernel.half), jnp.float32), _WGMMA)
    return lax.fori_loop(0, block.tiles, step, (acc, rows(_FIRST_MAXIMUM), rows(0.0)))


def _first(i: jax.Array) -> jax.Array:
    """0 for every tile i, but not so that a compiler knows: else it computes where each slice of an
    operand lies before the loop, and keeps that in registers that there are not."""
    return lax.div(i, 1 << 20)


def _scores(kernel: _Kernel, shared: _Shared, tile: Any, i: jax.Array) -> jax.Array:
    """Queries times the tile's tokens, [ROWS, KEYS] float32."""

    def multiply(columns: Any) -> Any:
        a, b = shared.queries.at[_first(i), :, columns], tile.at[:, columns]
        return lambda into: mgpu.wgmma(into, a, b.T)

    if not kernel.quantized:
        return mgpu.multiplied((ROWS, KEYS), multiply(mgpu.ds(0, kernel.columns)))
    # One sum for both parts, since two would not fit in registers: the rotated part enters it in
    # units of the other's scale, or of 2^-60 of its own where that is so small as not to matter.
    rope = mgpu.ds(kernel.value_dim, kernel.columns - kernel.value_dim)
    scores = mgpu.multiplied((ROWS, KEYS), multiply(rope))
    scores = scores * _to_rows(_scale(shared, i, 1) / _unit(shared, i))
    scores = mgpu.accumulate(scores, multiply(mgpu.ds(0, kernel.value_dim)))
    return scores * _to_rows(_unit(shared, i))


def _scale(shared: _Shared, i: jax.Array, which: int) -> jax.Array:
    """What the codes of tile i's tokens are multiplied with, [KEYS]."""
    place = shared.scales.at[lax.rem(i, _SCALE_STAGES), which]
    return mgpu.load(place, layout=_WGMMA.reduce(0), optimized=False)


def _unit(shared: _Shared, i: jax.Array) -> jax.Array:
    least = jnp.maximum(_scale(shared, i, 1) * 2.0**-60, 1e-30)
    return jnp.maximum(_scale(shared, i, 0), least)


def _to_rows(by: jax.Array) -> jax.Array:
    """[KEYS] for each row: [ROWS, KEYS]."""
    return lax.broadcast_in_dim(by, (ROWS, KEYS), [1])


def _columns(kernel: _Kernel, warpgroup: jax.Array) -> Any:
    """A warpgroup's value columns."""
    return mgpu.ds(mgpu.multiple_of(warpgroup * kernel.half, _CHUNK), kernel.half)


def _chunk(kernel: _Kernel, warpgroup: jax.Array, index: jax.Array) -> Any:
    """The index-th _CHUNK of them."""
    first = warpgroup * kernel.half + index * _CHUNK
    return mgpu.ds(mgpu.multiple_of(first, _CHUNK), _CHUNK)


def _visible(kernel: _Kernel, block: _Block, scores: jax.Array, first_key: jax.Array) -> jax.Array:
    """Scores [ROWS, KEYS] with those of tokens past each row's own position masked."""
    row = mgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_WGMMA)
    key = mgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
    at = lax.div(row + block.first, jnp.full_like(row, kernel.heads)) + block.position
    return jnp.where(key + first_key <= at, scores, _MASKED)


def _clear_tail(
    kernel: _Kernel,
    block: _Block,
    warpgroup: jax.Array,
    shared: _Shared,
    tile: Any,
    first_key: jax.Array,
) -> None:
    """Zeros for the values of tokens that none of the block sees: weights of 0 would not do, as
    what lies there may be NaN. Each warpgroup clears its own columns before either reads any."""

    @mgpu.when(first_key + KEYS > block.end)
    def _() -> None:
        def clear(i: jax.Array, _: None) -> None:
            chunk = tile.at[:, _chunk(kernel, warpgroup, i)]
            held = mgpu.load(chunk, layout=_WGMMA)
            chunk[...] = jnp.where(block.seen(first_key, _CHUNK), held, jnp.zeros_like(held))

        lax.fori_loop(0, kernel.half // _CHUNK, clear, None)
        mgpu.commit_smem()
        shared.meet()


def _spread(
    kernel: _Kernel,
    block: _Block,
    warpgroup: jax.Array,
    shared: _Shared,
    slot: jax.Array,
    tile: Any,
    first_key: jax.Array,
) -> None:
    """A warpgroup's part of the ring's codes into `tile`, zeros for tokens that none sees."""

    def convert(columns: Any) -> None:
        codes = mgpu.load(shared.ring.at[slot, :, columns], layout=mgpu.Layout.WGMMA_UPCAST_2X)
        numbers = _widened(mgpu.layout_cast(codes, _WGMMA))
        seen = jnp.where(block.seen(first_key, columns.size), numbers, 0.0)
        tile[:, columns] = seen.astype(kernel.out_dtype)

    # Loops, not unrolled: chunks side by side would not fit in registers beside the sums.
    lax.fori_loop(
        0, kernel.half // _CHUNK, lambda i, _: convert(_chunk(kernel, warpgroup, i)), None
    )

    @mgpu.when(warpgroup == 0)
    def _() -> None:
        convert(mgpu.ds(kernel.value_dim, kernel.columns - kernel.value_dim))

    mgpu.commit_smem()


def _widened(codes: jax.Array) -> jax.Array:
    """8-bit codes in float32, exactly, by the conversions that Hopper has."""
    way = jnp.bfloat16 if codes.dtype == jnp.int8 else jnp.float16
    return codes.astype(way).astype(jnp.float32)


def _write(
    kernel: _Kernel,
    block: _Block,
    warpgroup: jax.Array,
    sums: tuple[jax.Array, jax.Array, jax.Array],
    shared: _Shared,
    outputs: tuple[Any, ...],
) -> None:
    """The block's real rows of the output, or of its sums with their log-sum-exp."""
    acc, maximum, total = sums
    acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
    own = _columns(kernel, warpgroup)
    index, split = lax.axis_index("block"), lax.axis_index("split")
    shared.meet()  # the other warpgroup may still read tokens
    staged = shared.results.at[warpgroup]
    staged[...] = acc.astype(staged.dtype)
    mgpu.commit_smem()
    for unit in range(ROWS // kernel.unit):

        @mgpu.when(unit * kernel.unit < block.count)
        def _(unit: int = unit) -> None:
            rows = mgpu.ds(unit * kernel.unit, kernel.unit)
            if len(outputs) == 1:
                into = outputs[0].at[mgpu.ds(_row(kernel, block, unit), kernel.unit), own]
            else:
                into = outputs[0].at[split, index, rows, own]
            mgpu.copy_smem_to_gmem(staged.at[rows], into)

    mgpu.wait_smem_to_gmem(0)
    if len(outputs) == 2:

        @mgpu.when(warpgroup == 0)
        def _() -> None:
            mgpu.store(outputs[1].at[split, index], maximum + jnp.log2(total))


def _check_kernel(q: jax.Array, latent_pages: jax.Array, value_dim: int) -> None:
    _, H, C = q.shape
    page_size = latent_pages.shape[2]
    if q.dtype != jnp.bfloat16 or latent_pages.dtype not in (
        jnp.bfloat16,
        jnp.int8,
        jnp.float8_e4m3fn,
    ):
        raise ValueError(
            f"queries are {q.dtype} and pages {latent_pages.dtype}; want bfloat16 queries and "
            "bfloat16, int8 or float8_e4m3fn pages, or the reference backend"
        )
    if H % 8 or value_dim % (_COMPUTE * _CHUNK) or (C - value_dim) % 32 or C > 576:
        raise ValueError(
            f"{H} heads of {value_dim} + {C - value_dim} latent numbers; the kernel wants a "
            "multiple of 8 heads, of 128 and of 32, at most 576 in all, or the reference backend"
        )
    if page_size not in (16, 32, 64, 128):
        raise ValueError(f"pages hold {page_size} tokens; want 16, 32, 64 or 128")
