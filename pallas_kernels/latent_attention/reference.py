"""The meaning of latent attention, in plain jnp, at the speed XLA allows.

Softmax runs online over blocks of BLOCK_TOKENS tokens (arXiv:1805.02867), in float32; the blocks
lie at absolute positions, so one that holds nothing for a row leaves that row's bits alone.

Bytes: every live page of a row is read once per decode row, and once per tile of QUERY_TILE
queries of a prefill row; padding up to the next block is read besides.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 128
QUERY_TILE = 16
# Masked scores lie far below the initial maximum, so that exp(masked - maximum) is exactly 0
# even in a block where everything is masked.
_MASKED = -1e30
_INITIAL_MAX = -1e29


class _Pool(NamedTuple):
    """One layer's pages [N, page_size, C]; scales [N, 2, page_size] of 8-bit pages, else None."""

    pages: jax.Array
    scales: jax.Array | None
    value_dim: int

    def gather(self, ids: jax.Array) -> jax.Array:
        """Pages ids [B, n] as float32 tokens in a row, [B, n * page_size, C]."""
        found = self.pages[ids].astype(jnp.float32)
        if self.scales is not None:
            first, rest = jnp.split(found, [self.value_dim], axis=-1)
            by = self.scales[ids]
            found = jnp.concatenate(
                [first * by[..., 0, :, None], rest * by[..., 1, :, None]], axis=-1
            )
        B, n, page_size, C = found.shape
        return found.reshape(B, n * page_size, C)


def latent_attention_reference(
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
    value_dim: int,
    latent_scales: jax.Array | None = None,
) -> jax.Array:
    """See `latent_attention`."""
    scales = None if latent_scales is None else latent_scales[layer[0]]
    pool = _Pool(latent_pages[layer[0]], scales, value_dim)
    page_table = _whole_blocks(jnp.asarray(page_table), latent_pages.shape[2])
    scaled = q.astype(jnp.float32) * scale
    split = decode_rows * width
    parts = []
    if decode_rows:
        rows = slice(0, decode_rows)
        decode_q = scaled[:split].reshape(decode_rows, width, *q.shape[1:])
        first = kv_lens[rows] - query_lens[rows]
        out = _attend(decode_q, pool, page_table[rows], first, query_lens[rows])
        parts.append(out.reshape(split, *out.shape[2:]))
    if split < q.shape[0]:
        rows = slice(decode_rows, None)
        starts = query_starts[rows] - split
        parts.append(
            _prefill(
                scaled[split:], pool, page_table[rows], starts, query_lens[rows], kv_lens[rows]
            )
        )
    out = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return out.astype(q.dtype)


def _pages_per_block(page_size: int) -> int:
    return max(1, BLOCK_TOKENS // page_size)


def _whole_blocks(page_table: jax.Array, page_size: int) -> jax.Array:
    """Pad the table with page 0 to whole blocks: dynamic slices must never be clamped."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % _pages_per_block(page_size))))


def _attend(
    q: jax.Array,  # [B, Q, H, C] scaled float32
    pool: _Pool,
    page_table: jax.Array,  # [B, P]
    first: jax.Array,  # [B] position of q[:, 0]
    count: jax.Array,  # [B] how many of the Q queries are real
) -> jax.Array:
    """Each row's queries over that row's tokens up to each query. Returns [B, Q, H, value_dim]."""
    B, Q, H, C = q.shape
    page_size = pool.pages.shape[1]
    pages = _pages_per_block(page_size)
    block = pages * page_size
    real = jnp.arange(Q) < count[:, None]  # [B, Q]
    query_at = first[:, None] + jnp.arange(Q)
    queries = q.transpose(0, 2, 1, 3).reshape(B, H * Q, C)

    def step(i: jax.Array, carry: tuple) -> tuple:
        maximum, total, acc = carry
        tokens = pool.gather(jax.lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1))
        at = i * block + jnp.arange(block)
        visible = (at <= query_at[..., None]) & real[..., None]  # [B, Q, S]
        dot = jnp.einsum("bqc,bsc->bqs", queries, tokens, preferred_element_type=jnp.float32)
        scores = jnp.where(visible[:, None], dot.reshape(B, H, Q, block), _MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        p = jnp.exp(scores - new_maximum[..., None])
        keep = jnp.exp(maximum - new_maximum)
        # Slots that no query sees may hold anything, and 0 * NaN would not be 0.
        values = jnp.where(visible.any(1)[..., None], tokens[..., : pool.value_dim], 0)
        weighed = jnp.einsum("bhqs,bsv->bhqv", p, values, preferred_element_type=jnp.float32)
        return new_maximum, total * keep + p.sum(-1), acc * keep[..., None] + weighed

    blocks = jnp.max(jnp.where(count > 0, first + count - 1, -1)) // block + 1
    start = (
        jnp.full((B, H, Q), _INITIAL_MAX),
        jnp.zeros((B, H, Q)),
        jnp.zeros((B, H, Q, pool.value_dim)),
    )
    _, total, acc = jax.lax.fori_loop(0, blocks, step, start)
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return jnp.where(real[..., None, None], out.transpose(0, 2, 1, 3), 0)


def _prefill(
    q: jax.Array,  # [T, H, C] scaled float32
    pool: _Pool,
    page_table: jax.Array,  # [R, P]
    starts: jax.Array,  # [R] into q
    query_lens: jax.Array,  # [R]
    kv_lens: jax.Array,  # [R]
) -> jax.Array:
    """Tile after tile of QUERY_TILE queries, each over its own blocks. Returns [T, H, value_dim].

    A tile's tail, zeros, may reach into the next row's queries: they are written again by their
    own tiles, which come later because rows are in ascending order.
    """
    T, H, _ = q.shape
    tiles_of_row = (query_lens + QUERY_TILE - 1) // QUERY_TILE
    ends = jnp.cumsum(tiles_of_row)
    padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0)))

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, i, side="right")
        offset = (i - (ends[row] - tiles_of_row[row])) * QUERY_TILE
        at = starts[row] + offset
        done = _attend(
            jax.lax.dynamic_slice_in_dim(padded, at, QUERY_TILE)[None],
            pool,
            page_table[row][None],
            (kv_lens[row] - query_lens[row] + offset)[None],
            jnp.minimum(query_lens[row] - offset, QUERY_TILE)[None],
        )
        return jax.lax.dynamic_update_slice_in_dim(out, done[0], at, axis=0)

    start = jnp.zeros((T + QUERY_TILE, H, pool.value_dim))
    return jax.lax.fori_loop(0, ends[-1], tile, start)[:T]
