"""kv_write for Hopper: rotation, quantisation and scatter into the stacked pool, in place.

A thread block owns one KV head of a few tokens and reads each of their keys and values once,
straight into registers: no other thread block needs them. What it writes are rows of head_dim
keys and, in 8-bit pools, columns of head_dim values (those pages are transposed, so that values
are the matrix multiply's left operand): bytes head_dim apart, which TMA cannot write. Plain byte
stores can, and they leave the neighbouring tokens' bytes alone without reading them.

Bytes: 2 * D elements of k and v read and as many codes (and two scales) written per token and
head; nothing else of the pool is touched. Shared memory: none but the reductions' scratch.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.kv_write.reference import TOP_CODE

_TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class Tiles:
    """One row of the table: up to this many pairs of token and head, so many tokens a block."""

    max_pairs: float
    tokens: int
    reason: str


TILES = (
    Tiles(2112, 1, "132 SMs hold 16 blocks of a warpgroup each: one wave, the shortest chain"),
    Tiles(math.inf, 4, "several waves: four tokens' reads are in flight at once in a block"),
)


def pick_tiles(tokens: int, heads: int) -> Tiles:
    """The table's row for this many tokens and KV heads."""
    return next(row for row in TILES if tokens * heads <= row.max_pairs)


def write_kv_mosaic(
    key_pages: jax.Array,
    value_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slot: jax.Array,
    layer: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Write token t's k and v at flat slot write_slot[t] of layer; negative slots write nothing.

    key_pages [A, N, K, page, D]; value_pages the same, or [A, N, K, D, page] in 8-bit pools (int8,
    float8_e4m3fn), whose key_scales, value_scales float32 [A, N, K, page] take the largest
    absolute number by 127 or 448, NaN for a token and head that is not finite.
    k, v [T, K, D]; write_slot [T] int32, distinct where not negative; layer [1] int32.
    cos, sin float32 [T, D/2] rotate k's pairs (i, i + D/2) first, rounded to k's dtype.

    Returns (key_pages, value_pages, key_scales, value_scales), in place if they were donated.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(key_pages, value_pages, k, v, key_scales, value_scales, cos, sin)
    T, K, D = k.shape
    tiles = tiles or pick_tiles(T, K)
    tokens = math.gcd(tiles.tokens, T)
    quantised = key_scales is not None
    rotated = cos is not None
    refs = [
        None if x is None else jax.new_ref(x)
        for x in (key_pages, value_pages, key_scales, value_scales)
    ]

    def kv_write(*operands: jax.Array) -> None:
        given = list(operands)
        k, v, write_slot, layer = given[:4]
        angles = given[4:6] if rotated else None
        pool = given[6 if rotated else 4 :]
        head = lax.axis_index("head")
        first = lax.axis_index("block") * tokens
        halves = _layout(D // 2)

        def read(x: jax.Array, *at: jax.Array) -> tuple[jax.Array, jax.Array]:
            parts = (mgpu.ds(0, D // 2), mgpu.ds(D // 2, D // 2))
            a, b = (mgpu.load(x.at[(*at, p)], layout=halves, optimized=False) for p in parts)
            return a, b

        def angle(x: jax.Array, t: jax.Array) -> jax.Array:
            return mgpu.load(x.at[t], layout=halves, optimized=False)

        # All reads come before the first write, so that they wait for memory together.
        at = [first + i for i in range(tokens)]
        keys = [read(k, t, head) for t in at]
        values = [read(v, t, head) for t in at]
        turns = [None if angles is None else [angle(x, t) for x in angles] for t in at]
        for i, t in enumerate(at):
            slot = write_slot[t]

            @mgpu.when(slot >= 0)
            def _(i: int = i, slot: jax.Array = slot) -> None:
                page_size = pool[0].shape[3]
                place = (layer[0], lax.div(slot, page_size), head)
                offset = lax.rem(slot, page_size)
                turn = turns[i]
                key = keys[i] if turn is None else _rotate(*keys[i], *turn)
                for j, x in enumerate((key, values[i])):
                    if quantised:
                        x, scale = _quantize(*x, pool[j].dtype)
                        pool[2 + j].at[place][offset] = scale
                    for half, codes in enumerate(x):
                        part = mgpu.ds(half * (D // 2), D // 2)
                        where = (part, offset) if quantised and j else (offset, part)
                        mgpu.store(pool[j].at[(*place, *where)], codes)

    mgpu.kernel(
        kv_write,
        out_type=(),
        grid=(T // tokens, K),
        grid_names=("block", "head"),
        interpret=interpret,
    )(
        k,
        v,
        write_slot,
        layer,
        *((cos, sin) if rotated else ()),
        *(ref for ref in refs if ref is not None),
    )
    key_pages, value_pages, key_scales, value_scales = (
        None if ref is None else jax.freeze(ref) for ref in refs
    )
    return key_pages, value_pages, key_scales, value_scales


def _layout(size: int) -> object:
    """Registers of a vector of `size`, a multiple of 8: as many threads as divide it, the rest
    hold copies."""
    group = math.gcd(size, 128)
    lanes = min(group, 32)
    warps = group // lanes
    return mgpu.tiled_vector(warps, lanes)


def _rotate(
    a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Halves of a key turned by the angles, in float32, rounded once to the key's dtype."""
    wide_a, wide_b = a.astype(jnp.float32), b.astype(jnp.float32)
    turned = wide_a * cos - wide_b * sin, wide_b * cos + wide_a * sin
    return turned[0].astype(a.dtype), turned[1].astype(a.dtype)


def _quantize(
    a: jax.Array, b: jax.Array, dtype: jnp.dtype
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Halves as codes and their scale, with the arithmetic of `reference.quantize_kv`."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    top = jnp.maximum(jnp.max(jnp.abs(a)), jnp.max(jnp.abs(b)))
    scale = top * (1 / TOP_CODE[jnp.dtype(dtype)])
    scale = jnp.where(scale < _TINY, 0.0, scale)
    factor = 1 / jnp.where(scale == 0, 1.0, scale)
    finite = top < jnp.inf

    def codes(x: jax.Array) -> jax.Array:
        x = jnp.where(jnp.broadcast_to(finite, x.shape), x * factor, 0.0)
        return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)

    return (codes(a), codes(b)), jnp.where(finite, scale, jnp.nan)


def _check(
    key_pages: jax.Array,
    value_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
) -> None:
    A, N, K, page_size, D = key_pages.shape
    quantised = key_pages.dtype.itemsize == 1
    if quantised and key_pages.dtype not in TOP_CODE:
        raise ValueError(f"pages are {key_pages.dtype}; want bfloat16, int8 or float8_e4m3fn")
    want = (A, N, K, D, page_size) if quantised else key_pages.shape
    if value_pages.shape != want or value_pages.dtype != key_pages.dtype:
        raise ValueError(
            f"value pages are {value_pages.dtype}{value_pages.shape}; want {key_pages.dtype}{want} "
            f"beside key pages {key_pages.shape} (8-bit values lie transposed)"
        )
    if k.shape != v.shape or k.shape[1:] != (K, D):
        raise ValueError(f"keys {k.shape} and values {v.shape}; want both [tokens, {K}, {D}]")
    if D % 16:
        raise ValueError(f"head_dim is {D}; want a multiple of 16, or use the reference backend")
    scales = [None if x is None else x.shape for x in (key_scales, value_scales)]
    if scales != [(A, N, K, page_size) if quantised else None] * 2:
        raise ValueError(
            f"scales are {scales[0]} and {scales[1]} for {key_pages.dtype} pages; want "
            f"{(A, N, K, page_size)} for 8-bit pages and None for others"
        )
    angles = [None if x is None else x.shape for x in (cos, sin)]
    if angles not in ([None, None], [(k.shape[0], D // 2)] * 2):
        raise ValueError(f"cos and sin are {angles}; want both {(k.shape[0], D // 2)} or neither")
