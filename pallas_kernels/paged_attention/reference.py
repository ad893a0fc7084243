"""The meaning of paged attention, in plain jnp, at the speed XLA allows.

Softmax runs online over blocks of BLOCK_TOKENS keys (Milakov & Gimelshein 2018, arXiv:1805.02867),
in float32. The blocks are aligned to absolute positions and their number is a run-time value, so
one compiled program serves every context length, short contexts read few bytes, and a block that
holds nothing for a row leaves that row's bits alone: it scales by exp(0) and adds zeros.

Bytes: every live page of a row is read once per decode row, and once per tile of QUERY_TILE
queries of a prefill row; padding up to the next block is read besides.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 128
QUERY_TILE = 64
# Masked scores lie far below the initial maximum, so that exp(masked - maximum) is exactly 0
# even in a block where everything is masked.
_MASKED = -1e30
_INITIAL_MAX = -1e29


class _Pages(NamedTuple):
    """Keys and values [N, page_size, K, D]; scales [N, page_size, K] of 8-bit pages, else None."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None
    value_scales: jax.Array | None

    def gather(self, ids: jax.Array, shape: tuple[int, ...]) -> "_Pages":
        """Pages ids as tokens in a row: keys [*shape, K, D], scales [*shape, K]."""
        K, D = self.keys.shape[2:]
        keys, values = (x[ids].reshape(*shape, K, D) for x in (self.keys, self.values))
        if self.key_scales is None or self.value_scales is None:
            return _Pages(keys, values, None, None)
        scales = (x[ids].reshape(*shape, K) for x in (self.key_scales, self.value_scales))
        return _Pages(keys.astype(jnp.float32), values.astype(jnp.float32), *scales)


def paged_attention_reference(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """See `paged_attention`."""
    T, H, D = q.shape
    pool = _Pages(key_pages, value_pages, key_scales, value_scales)
    K = key_pages.shape[2]
    page_table = _whole_blocks(page_table, key_pages.shape[1])
    grouped = (q.astype(jnp.float32) * scale).reshape(T, K, H // K, D)
    group_sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, H // K)
    parts = []
    split = decode_rows * width
    if decode_rows:
        rows = slice(0, decode_rows)
        decode_q = grouped[:split].reshape(decode_rows, width, K, H // K, D)
        parts.append(
            _decode_rows(
                decode_q, pool, page_table[rows], query_lens[rows], kv_lens[rows], window,
                softcap, group_sinks, tree_mask,
            )
        )  # fmt: skip
    if split < T:
        rows = slice(decode_rows, None)
        parts.append(
            _prefill_rows(
                grouped[split:], pool, page_table[rows], query_starts[rows] - split,
                query_lens[rows], kv_lens[rows], window, softcap, group_sinks,
            )
        )  # fmt: skip
    out = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return out.reshape(T, H, D).astype(q.dtype)


def _whole_blocks(page_table: jax.Array, page_size: int) -> jax.Array:
    """Pad the table with page 0 to whole blocks: dynamic slices must never be clamped."""
    pages = _pages_per_block(page_size)
    return jnp.pad(jnp.asarray(page_table), ((0, 0), (0, -page_table.shape[1] % pages)))


def _pages_per_block(page_size: int) -> int:
    return max(1, BLOCK_TOKENS // page_size)


def _block_range(
    first_position: jax.Array, last_position: jax.Array, window: int | None, block: int
) -> tuple[jax.Array, jax.Array]:
    """Blocks [lo, hi) that hold keys for queries at positions first to last."""
    lo = jnp.zeros_like(first_position)
    if window is not None:
        lo = jnp.maximum(first_position - window + 1, 0) // block
    return lo, last_position // block + 1


def _scores(dot: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    if softcap is not None:
        dot = softcap * jnp.tanh(dot / softcap)
    return jnp.where(visible, dot, _MASKED)


def _start(
    shape: tuple[int, ...], D: int, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(running maximum, running sum, weighted values); a sink is a key that adds no value."""
    maximum = jnp.full(shape, _INITIAL_MAX) if sinks is None else jnp.broadcast_to(sinks, shape)
    total = jnp.zeros(shape) if sinks is None else jnp.ones(shape)
    return maximum, total, jnp.zeros((*shape, D))


def _absorb(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    scores: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One online-softmax step; scores [..., S], weigh(p [..., S]) -> [..., D]."""
    maximum, total, acc = carry
    new_maximum = jnp.maximum(maximum, scores.max(-1))
    p = jnp.exp(scores - new_maximum[..., None])
    keep = jnp.exp(maximum - new_maximum)
    return new_maximum, total * keep + p.sum(-1), acc * keep[..., None] + weigh(p)


def _weigh_values(einsum: str, p: jax.Array, kv: _Pages, seen: jax.Array) -> jax.Array:
    """p @ values; slots that no query sees may hold anything, and 0 * NaN would not be 0."""
    values = jnp.where(seen[..., None, None], kv.values, 0)
    if kv.value_scales is not None:
        values = values * jnp.where(seen[..., None], kv.value_scales, 0)[..., None]
    return jnp.einsum(einsum, p, values, preferred_element_type=jnp.float32)


def _finish(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    _, total, acc = carry
    return acc / jnp.where(total == 0, 1, total)[..., None]


def _decode_rows(
    q: jax.Array,  # [B, W, K, G, D] scaled float32
    pool: _Pages,
    page_table: jax.Array,  # [B, P]
    query_lens: jax.Array,  # [B]
    kv_lens: jax.Array,  # [B]
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
) -> jax.Array:
    """All decode rows side by side, block after block. Returns [B * W, K, G, D]."""
    B, W, K, G, D = q.shape
    page_size = pool.keys.shape[1]
    pages = _pages_per_block(page_size)
    block = pages * page_size
    first_own = kv_lens - query_lens  # [B] position of the row's first query
    query_at = first_own[:, None] + jnp.arange(W)  # [B, W]
    real = jnp.arange(W) < query_lens[:, None]
    # A padded row must not widen the range of blocks that the real ones need.
    lo, hi = _block_range(
        jnp.min(jnp.where(query_lens > 0, first_own, jnp.iinfo(jnp.int32).max)),
        jnp.max(kv_lens) - 1,
        window,
        block,
    )
    queries = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * W, D)

    def step(i: jax.Array, carry: tuple) -> tuple:
        ids = jax.lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
        kv = pool.gather(ids, (B, block))
        key_at = i * block + jnp.arange(block)
        written = key_at < kv_lens[:, None]  # [B, S]
        visible = _decode_visible(key_at, query_at, first_own, real, window, tree_mask)
        visible &= written[:, None]
        seen = visible.any(1)  # pages out of the window may be somebody else's by now
        dot = jnp.einsum("bkqd,bskd->bkqs", queries, kv.keys, preferred_element_type=jnp.float32)
        if kv.key_scales is not None:
            dot = dot * kv.key_scales.transpose(0, 2, 1)[:, :, None]
        shaped = dot.reshape(B, K, G, W, block)
        scores = _scores(shaped, visible[:, None, None], softcap)
        return _absorb(
            carry,
            scores.reshape(B, K, G * W, block),
            lambda p: _weigh_values("bkqs,bskd->bkqd", p, kv, seen),
        )

    row_sinks = None if sinks is None else jnp.repeat(sinks, W, axis=1)[None]
    out = _finish(jax.lax.fori_loop(lo, hi, step, _start((B, K, G * W), D, row_sinks)))
    out = out.reshape(B, K, G, W, D).transpose(0, 3, 1, 2, 4)
    out = jnp.where(real[:, :, None, None, None], out, 0)
    return out.reshape(B * W, K, G, D)


def _decode_visible(
    key_at: jax.Array,  # [S]
    query_at: jax.Array,  # [B, W]
    first_own: jax.Array,  # [B]
    real: jax.Array,  # [B, W]
    window: int | None,
    tree_mask: jax.Array | None,
) -> jax.Array:
    """Which key each query may see, [B, W, S]."""
    visible = key_at <= query_at[..., None]
    if window is not None:
        visible &= key_at > query_at[..., None] - window
    if tree_mask is not None:
        W = query_at.shape[1]
        own = key_at - first_own[:, None]  # [B, S] index among the row's own tokens
        chosen = jnp.take_along_axis(tree_mask, jnp.clip(own, 0, W - 1)[:, None], axis=2)
        visible = jnp.where((own < 0)[:, None], visible, chosen & (own < W)[:, None])
    return visible & real[..., None]


def _prefill_rows(
    q: jax.Array,  # [T, K, G, D] scaled float32
    pool: _Pages,
    page_table: jax.Array,  # [N, P]
    starts: jax.Array,  # [N] into q
    query_lens: jax.Array,  # [N]
    kv_lens: jax.Array,  # [N]
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Tile after tile of QUERY_TILE queries, each over its own blocks. Returns [T, K, G, D].

    A tile's tail may reach into the next row's queries: they are written again by their own tiles,
    which come later because rows are in ascending order; what lies past the last row is cleared.
    """
    T, K, G, D = q.shape
    tiles_of_row = (query_lens + QUERY_TILE - 1) // QUERY_TILE
    ends = jnp.cumsum(tiles_of_row)
    padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, i, side="right")
        offset = (i - (ends[row] - tiles_of_row[row])) * QUERY_TILE
        at = starts[row] + offset
        first = kv_lens[row] - query_lens[row] + offset
        tile_q = jax.lax.dynamic_slice_in_dim(padded, at, QUERY_TILE)
        done = _prefill_tile(
            tile_q, pool, page_table[row], first, kv_lens[row], window, softcap, sinks
        )  # fmt: skip
        return jax.lax.dynamic_update_slice_in_dim(out, done, at, axis=0)

    out = jax.lax.fori_loop(0, ends[-1], tile, jnp.zeros((T + QUERY_TILE, K, G, D)))
    used = jnp.max(starts + query_lens)
    return jnp.where((jnp.arange(T) < used)[:, None, None, None], out[:T], 0)


def _prefill_tile(
    q: jax.Array,  # [QUERY_TILE, K, G, D]
    pool: _Pages,
    pages_of_row: jax.Array,  # [P]
    first: jax.Array,  # position of q[0]
    kv_len: jax.Array,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    Q, K, G, D = q.shape
    page_size = pool.keys.shape[1]
    pages = _pages_per_block(page_size)
    block = pages * page_size
    query_at = first + jnp.arange(Q)
    lo, hi = _block_range(first, jnp.minimum(first + Q, kv_len) - 1, window, block)
    queries = q.transpose(1, 2, 0, 3).reshape(K, G * Q, D)

    def step(i: jax.Array, carry: tuple) -> tuple:
        ids = jax.lax.dynamic_slice_in_dim(pages_of_row, i * pages, pages)
        kv = pool.gather(ids, (block,))
        key_at = i * block + jnp.arange(block)
        written = key_at < kv_len
        visible = (key_at <= query_at[:, None]) & written
        if window is not None:
            visible &= key_at > query_at[:, None] - window
        seen = visible.any(0)
        dot = jnp.einsum("kqd,skd->kqs", queries, kv.keys, preferred_element_type=jnp.float32)
        if kv.key_scales is not None:
            dot = dot * kv.key_scales.T[:, None]
        scores = _scores(dot.reshape(K, G, Q, block), visible, softcap)
        return _absorb(
            carry,
            scores.reshape(K, G * Q, block),
            lambda p: _weigh_values("kqs,skd->kqd", p, kv, seen),
        )

    row_sinks = None if sinks is None else jnp.repeat(sinks, Q, axis=1)
    out = _finish(jax.lax.fori_loop(lo, hi, step, _start((K, G * Q), D, row_sinks)))
    return out.reshape(K, G, Q, D).transpose(2, 0, 1, 3)
