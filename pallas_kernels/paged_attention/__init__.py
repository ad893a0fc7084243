"""Ragged paged attention: decode, verify and prefill rows of one step in one call."""

import jax

from pallas_kernels.paged_attention.reference import paged_attention_reference


def paged_attention(
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    backend: str = "reference",
) -> jax.Array:
    """Causal attention of every query over the pages of its row.

    q [T, H, D]: the first decode_rows rows own `width` queries each, row r's being
    [r * width, (r + 1) * width) of which query_lens[r] are real; row r >= decode_rows owns
    [query_starts[r], query_starts[r] + query_lens[r]), rows in ascending order.
    key_pages, value_pages [N, page_size, K, D], H a multiple of K; page_table [R, P];
    query_starts, query_lens, kv_lens [R]. Query i of a row stands at position
    kv_lens - query_lens + i and sees the keys at positions <= its own, at most `window` of them.
    softcap c maps a score s to c * tanh(s / c); sinks [H] are logits of a key without a value;
    key_scales, value_scales [N, page_size, K] multiply pages of 8 bits, per token and KV head.
    tree_mask [decode_rows, width, width] replaces causality among a decode row's own queries.

    Returns [T, H, D] in q's dtype, zero for padding. Order of pages, other rows, and whatever
    lies in free pages or past kv_lens (NaN too) change no bit of it.

    Raises ValueError for shapes that do not fit, NotImplementedError for an unknown backend.
    """
    _check_shapes(q, key_pages, value_pages, page_table, query_lens, decode_rows, width)
    if backend != "reference":
        raise NotImplementedError(
            f"paged_attention has no backend {backend!r}; it has: reference (and .cpu)"
        )
    return paged_attention_reference(
        q,
        key_pages,
        value_pages,
        page_table,
        query_starts,
        query_lens,
        kv_lens,
        decode_rows=decode_rows,
        width=width,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tree_mask=tree_mask,
        key_scales=key_scales,
        value_scales=value_scales,
    )


def _check_shapes(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    query_lens: jax.Array,
    decode_rows: int,
    width: int,
) -> None:
    T, H, D = q.shape
    N, _, K, page_dim = key_pages.shape
    if key_pages.shape != value_pages.shape or page_dim != D or H % K:
        raise ValueError(
            f"queries {q.shape} do not fit pages {key_pages.shape} and {value_pages.shape}: "
            "head_dim must agree and query heads be a multiple of KV heads"
        )
    R = query_lens.shape[0]
    if page_table.shape[0] != R or decode_rows > R or decode_rows * width > T:
        raise ValueError(
            f"{decode_rows} decode rows of width {width} do not fit {R} rows, {T} tokens and a "
            f"page table of shape {page_table.shape}"
        )
    if N < 1:
        raise ValueError("the pool has no pages; page 0 must exist for padding to point at")
