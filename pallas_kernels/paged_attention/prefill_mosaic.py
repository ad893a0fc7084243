"""Paged attention of prefill chunks on Hopper: ragged rows, cached prefix, causal.

A thread block takes one tile of the work list (prefill_plan.py): 128 query rows, tokens times the
heads that share a KV head. One warpgroup loads (prefill_load.py); two compute, 64 rows each
(prefill_attend.py).

Shared memory: queries [2, 64, D] (the output takes their place), rings of `stages` tiles of keys
[keys, D] and values ([keys, D]; [D, keys] when they come from 8-bit pages), and of `staged` tiles
of 8-bit codes with their scales; see prefill_tiles.py for the sizes.

Bytes: a tile reads its queries once, and of keys and values the pages of its row in
[first visible key, last query's position], widened to whole tiles of keys; it writes its output
once. Nothing else moves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.prefill_attend import (
    COMPUTE_WARPGROUPS,
    Attend,
    PrefillKernel,
)
from pallas_kernels.paged_attention.prefill_load import Loader, PageTiles, Pool
from pallas_kernels.paged_attention.prefill_plan import (
    TOKEN_BLOCK,
    WARPGROUP_ROWS,
    Run,
    Work,
    packing,
    work_list,
)
from pallas_kernels.paged_attention.prefill_tiles import PrefillTile, prefill_tile


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
    kernel = PrefillKernel(
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
        num_threads=COMPUTE_WARPGROUPS + 1,
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


def _body(kernel: PrefillKernel, refs: tuple[Any, ...]) -> None:
    """One thread block: refs are the operands of `prefill_attention`'s call, then the output."""
    D, dtype = kernel.head_dim, kernel.pages.dtype
    # Rows one by one, at multiples of 128 bytes, for tiles that must not write whole runs. They
    # take the place of the queries, and of those of the same warpgroup only: the other one may
    # not be done with its own.
    pitch = -(-D // 64) * 64
    lines = mgpu.SMEM(
        (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, pitch),
        dtype,
        transforms=mgpu.swizzle_transforms(D, dtype, rows=1),
    )
    height = -(-WARPGROUP_ROWS * pitch // (D * TOKEN_BLOCK)) * TOKEN_BLOCK
    queries = mgpu.SMEM(
        (COMPUTE_WARPGROUPS, height, D), dtype, transforms=mgpu.swizzle_transforms(D, dtype)
    )
    mgpu.run_scoped(
        functools.partial(_block, kernel, refs),
        mgpu.RefUnion(queries, lines),
        mgpu.Barrier(num_arrivals=len(kernel.packing.runs)),
        mgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        kernel.pages.ring(),
        collective_axes="warpgroup",
    )


def _block(
    kernel: PrefillKernel,
    refs: tuple[Any, ...],
    rows: Any,
    loaded: Any,
    turn: Any,
    ring: dict[str, Any],
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

    @mgpu.when((work.span > 0) & (warpgroup == COMPUTE_WARPGROUPS))
    def load() -> None:
        mgpu.set_max_registers(kernel.tile.load_registers, action="decrease")

        @mgpu.when(work.end > work.first)
        def fill() -> None:
            for run in kernel.packing.runs:
                token = mgpu.ds(_token(work, run), run.tokens)
                target = queries.at[run.warpgroup, mgpu.ds(run.row, run.tokens)]
                source = q.at[token, first_head + run.head]
                mgpu.copy_gmem_to_smem(source, target, loaded, name="q")
            Loader(kernel.pages, pool, ring, work, kv_head).run()

    @mgpu.when((work.span > 0) & (warpgroup < COMPUTE_WARPGROUPS))
    def compute() -> None:
        mgpu.set_max_registers(kernel.tile.compute_registers, action="increase")

        @mgpu.when(work.end > work.first)
        def wait() -> None:
            mgpu.barrier_wait(loaded)

        attend = Attend(kernel, ring, turn, work, warpgroup)
        own = queries.at[warpgroup, mgpu.ds(0, WARPGROUP_ROWS)]
        weighted = attend.run(own, sinks, first_head)
        _write(kernel, work, warpgroup, first_head, weighted.astype(out.dtype), rows, out)


def _token(work: Work, run: Run) -> jax.Array:
    return (work.block + run.first_token // TOKEN_BLOCK) * TOKEN_BLOCK


def _write(
    kernel: PrefillKernel,
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
    def by_runs() -> None:
        queries.at[warpgroup, mgpu.ds(0, WARPGROUP_ROWS)][...] = result
        mgpu.commit_smem()
        for run in packed.runs:

            @mgpu.when(warpgroup == run.warpgroup)
            def store(run: Any = run) -> None:
                source = queries.at[run.warpgroup, mgpu.ds(run.row, run.tokens)]
                token = mgpu.ds(_token(work, run), run.tokens)
                mgpu.copy_smem_to_gmem(source, out.at[token, first_head + run.head])

    @mgpu.when(jnp.logical_not(whole))
    def by_rows() -> None:
        mgpu.store(lines.at[warpgroup, :, mgpu.ds(0, D)], result)
        mgpu.commit_smem()

        def line(i: jax.Array, _: None) -> None:
            row = warpgroup * WARPGROUP_ROWS + i
            head, token = (f(row, jnp.int32(packed.tokens)) for f in (lax.div, lax.rem))

            @mgpu.when((head < packed.heads) & (token >= work.first) & (token < work.span))
            def store() -> None:
                source = lines.at[warpgroup, mgpu.ds(i, 1), mgpu.ds(0, D)]
                mgpu.copy_smem_to_gmem(
                    source, out.at[mgpu.ds(work.block * TOKEN_BLOCK + token, 1), first_head + head]
                )

        lax.fori_loop(0, WARPGROUP_ROWS, line, None)

    mgpu.wait_smem_to_gmem(0)
