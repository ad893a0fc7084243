"""What the decode kernel's shapes are, and the small arrays that XLA prepares for it.

Query columns: column c of a KV head is query token c // G and query head c % G of that KV head.
They are cut into groups, one warpgroup each: of at most tile.columns, padded to multiples of 8.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.decode_tiles import DecodeTile, decode_tile

LOG2_E = 1.4426950408889634
MAX_WIDTH = 31  # a row's own tokens are bits of one int32
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
MULTIPROCESSORS = 132
WAVES = 2  # thread blocks to have in all, in units of what the GPU holds at once


@dataclass(frozen=True)
class Layout:
    """Everything about one call that is known when it is compiled."""

    rows: int
    width: int
    kv_heads: int
    group_size: int
    head_dim: int
    page: int
    table_width: int
    pages_per_layer: int
    cache_dtype: jnp.dtype
    out_dtype: jnp.dtype
    scaled: bool
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    splits: int
    tile: DecodeTile

    @property
    def columns(self) -> int:
        return self.width * self.group_size

    @property
    def parts(self) -> int:
        """Thread blocks that share a KV head's keys; more than one only for very many columns."""
        return -(-self.columns // (self.tile.groups * self.tile.columns))

    @property
    def part_columns(self) -> int:
        """Columns of one thread block, the last one's padded."""
        if self.parts == 1:
            return self.columns
        return self.groups * self.group_columns

    @property
    def groups(self) -> int:
        return min(self.tile.groups, -(-self.columns // self.tile.columns))

    @property
    def group_columns(self) -> int:
        return min(self.tile.columns, -(-self.columns // 8) * 8)

    @property
    def eight_bit(self) -> bool:
        return self.cache_dtype.itemsize == 1

    @property
    def compute_dtype(self) -> jnp.dtype:
        """What the tensor core multiplies: e4m3 widens to float16, int8 to bfloat16."""
        if self.cache_dtype == jnp.float8_e4m3fn:
            return jnp.dtype(jnp.float16)
        return jnp.dtype(jnp.bfloat16) if self.eight_bit else self.cache_dtype

    @property
    def piece(self) -> int:
        """Keys of one copy: a page, or a tile's share of a longer one."""
        return min(self.page, self.tile.keys)

    @property
    def pieces(self) -> int:
        """Copies of one tile."""
        return self.tile.keys // self.piece

    @property
    def key_chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of the parts of head_dim that go through registers one at a time."""
        D = self.head_dim
        width = D if D % 32 else math.gcd(D, 128)
        return tuple((at, width) for at in range(0, D, width))

    @property
    def value_chunks(self) -> tuple[int, ...]:
        """Starts of the pieces of 64 that V^T's rows are cut into; the last may overlap."""
        starts = list(range(0, self.head_dim - 63, 64))
        if self.head_dim % 64:
            starts.append(self.head_dim - 64)
        return tuple(starts)


def layout_of(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    *,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    scaled: bool,
    splits: int | None,
    tile: DecodeTile | None,
) -> Layout:
    """The layout of a call. Raises ValueError, saying what would do, if none fits."""
    K, page, D = key_pages.shape[2:]
    B, H = page_table.shape[0], q.shape[1]
    dtype = jnp.dtype(key_pages.dtype)
    _check(q, key_pages, value_pages, B, width, scaled)
    tile = tile or decode_tile(D, dtype.itemsize * 8)
    if splits is None:
        splits = _splits(B * K, page_table.shape[1] * page, tile)
    return Layout(
        rows=B, width=width, kv_heads=K, group_size=H // K, head_dim=D, page=page,
        table_width=page_table.shape[1], pages_per_layer=key_pages.shape[1], cache_dtype=dtype,
        out_dtype=jnp.dtype(q.dtype),
        scaled=scaled, scale=scale, window=window, softcap=softcap, sinks=sinks, splits=splits,
        tile=tile,
    )  # fmt: skip


def _check(
    q: jax.Array, key_pages: jax.Array, value_pages: jax.Array, rows: int, width: int, scaled: bool
) -> None:
    A, N, K, page, D = key_pages.shape
    dtype = jnp.dtype(key_pages.dtype)
    if D not in HEAD_DIMS or page not in PAGE_SIZES:
        raise ValueError(
            f"decode attention on the GPU takes head_dim of {HEAD_DIMS} and pages of {PAGE_SIZES} "
            f"tokens, got {D} and {page}; use the reference backend"
        )
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn):
        raise ValueError(
            f"decode attention on the GPU takes a cache of bfloat16, float16, int8 or "
            f"float8_e4m3fn, got {dtype}"
        )
    want = (A, N, K, D, page) if dtype.itemsize == 1 else (A, N, K, page, D)
    if value_pages.shape != want or value_pages.dtype != dtype:
        raise ValueError(
            f"keys {key_pages.shape} {dtype} want values {want} {dtype}, "
            f"got {value_pages.shape} {value_pages.dtype}"
        )
    if scaled != (dtype.itemsize == 1):
        raise ValueError(f"a cache of {dtype} {'has no' if scaled else 'needs'} scales")
    if not 1 <= width <= MAX_WIDTH or q.shape[0] != rows * width or q.shape[1] % K:
        raise ValueError(
            f"queries {q.shape} are not {rows} rows of {width} tokens (at most {MAX_WIDTH}) with "
            f"a multiple of {K} heads"
        )


def _splits(blocks: int, keys: int, tile: DecodeTile) -> int:
    """Enough thread blocks to fill the GPU, and no split so short that merging would matter."""
    wanted = -(-WAVES * MULTIPROCESSORS * tile.blocks // blocks)
    return max(1, min(wanted, keys // tile.min_keys))


def flat_pages(pages: jax.Array) -> jax.Array:
    """[A, N, K, rows, columns] as a matrix: the copy engine takes at most five dimensions."""
    return pages.reshape(-1, pages.shape[-1])


def pack_queries(q: jax.Array, plan: Layout) -> jax.Array:
    """[B * W, H, D] as [B, K * parts, groups, group_columns, D]; padding is zero."""
    B, W, K, G, D = plan.rows, plan.width, plan.kv_heads, plan.group_size, plan.head_dim
    x = q.astype(plan.compute_dtype).reshape(B, W, K, G, D).swapaxes(1, 2).reshape(B, K, W * G, D)
    return _pad_columns(x, plan, axis=2)


def pack_sinks(sinks: jax.Array, plan: Layout) -> jax.Array:
    """[H] as float32 [K * parts, groups, group_columns], in powers of two."""
    x = (sinks.astype(jnp.float32) * LOG2_E).reshape(plan.kv_heads, 1, plan.group_size)
    x = jnp.broadcast_to(x, (plan.kv_heads, plan.width, plan.group_size))
    return _pad_columns(x.reshape(plan.kv_heads, plan.columns), plan, axis=1)


def column_marks(plan: Layout, query_lens: jax.Array, tree_mask: jax.Array | None) -> jax.Array:
    """What each query column may see, int32 [B * parts, groups, 2, group_columns].

    First a word whose bit j says that it sees the row's own token j; then the first position that
    it sees, counted from the row's own first token (a window reaches less far for a later token).
    """
    W = plan.width
    token, own = jnp.arange(W), jnp.arange(W)
    sees = own <= token[:, None]
    if plan.window is not None:
        sees &= own > token[:, None] - plan.window
    if tree_mask is not None:
        sees = tree_mask
    real = own < query_lens[:, None]  # [B, W]
    sees = sees & real[:, None, :] & real[:, :, None]
    words = (sees.astype(jnp.int32) << own).sum(-1)  # [B, W]
    reach = -(2**30) if plan.window is None else token - plan.window + 1
    marks = jnp.stack([words, jnp.broadcast_to(reach, words.shape)], axis=1)  # [B, 2, W]
    by_column = jnp.repeat(marks.swapaxes(1, 2), plan.group_size, axis=1)
    return _pad_columns(by_column, plan, axis=1).swapaxes(2, 3)


def _pad_columns(x: jax.Array, plan: Layout, axis: int) -> jax.Array:
    """Axes axis - 1 and `columns` as three: the first times parts, groups and group_columns."""
    whole = plan.parts * plan.groups * plan.group_columns
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, whole - plan.columns)
    first = (x.shape[axis - 1] * plan.parts, plan.groups, plan.group_columns)
    return jnp.pad(x, padding).reshape(*x.shape[: axis - 1], *first, *x.shape[axis + 1 :])
