"""Attention over a paged latent cache (MLA): decode, verify and prefill rows in one call."""

import jax

from pallas_kernels.latent_attention.reference import latent_attention_reference


def latent_attention(
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
    backend: str = "reference",
) -> jax.Array:
    """Causal multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form.

    One vector of C = value_dim + rope numbers per token serves all heads: as the key whole, as
    the value its first value_dim. q [T, H, C] are queries already multiplied into the latent
    space, rotated part last; latent_pages [A, N, page_size, C], read at layer [1] of A.
    The first decode_rows rows own `width` queries each, row r's being [r * width, (r + 1) * width)
    of which query_lens[r] are real; row r >= decode_rows owns
    [query_starts[r], query_starts[r] + query_lens[r]), rows in ascending order.
    page_table [R, P]; query_starts, query_lens, kv_lens [R]. Query i of a row stands at position
    kv_lens - query_lens + i and sees the tokens at positions <= its own.
    latent_scales [A, N, 2, page_size] float32 belong to 8-bit pages (int8, float8_e4m3fn): per
    token what multiplies the first value_dim numbers, and what multiplies the rest.

    Returns [T, H, value_dim] in q's dtype, zero for padding. Order of pages, other rows, and
    whatever lies in free pages or past kv_lens (NaN too) change no bit of it.

    Raises ValueError for shapes that do not fit, NotImplementedError for an unknown backend.
    """
    check_shapes(q, latent_pages, page_table, query_lens, decode_rows, width, value_dim)
    check_scales(latent_pages, latent_scales)
    if backend != "reference":
        raise NotImplementedError(
            f"latent_attention has no backend {backend!r}; it has: reference (and .mosaic_gpu)"
        )
    return latent_attention_reference(
        q,
        latent_pages,
        layer,
        page_table,
        query_starts,
        query_lens,
        kv_lens,
        decode_rows=decode_rows,
        width=width,
        scale=scale,
        value_dim=value_dim,
        latent_scales=latent_scales,
    )


def check_shapes(
    q: jax.Array,
    latent_pages: jax.Array,
    page_table: jax.Array,
    query_lens: jax.Array,
    decode_rows: int,
    width: int,
    value_dim: int,
) -> None:
    """Raise ValueError, with what would fit, unless these arguments fit each other."""
    T, _, C = q.shape
    if latent_pages.ndim != 4 or latent_pages.shape[3] != C:
        raise ValueError(
            f"queries {q.shape} do not fit latent pages {latent_pages.shape}; want pages "
            f"[layers, pages, page_size, {C}]: multiply the queries into the latent space first"
        )
    if not 0 < value_dim <= C:
        raise ValueError(f"value_dim is {value_dim}; want 1 to {C}, a part of the latent vector")
    R = query_lens.shape[0]
    if page_table.shape[0] != R or decode_rows > R or decode_rows * width > T:
        raise ValueError(
            f"{decode_rows} decode rows of width {width} do not fit {R} rows, {T} tokens and a "
            f"page table of shape {page_table.shape}; want a table of {R} rows and at least "
            f"{decode_rows * width} tokens"
        )
    if latent_pages.shape[1] < 1:
        raise ValueError("the pool has no pages; page 0 must exist for padding to point at")


def check_scales(latent_pages: jax.Array, latent_scales: jax.Array | None) -> None:
    """Raise ValueError unless 8-bit pages, and only they, come with their scales."""
    A, N, page_size, _ = latent_pages.shape
    want = (A, N, 2, page_size) if latent_pages.dtype.itemsize == 1 else None
    got = None if latent_scales is None else latent_scales.shape
    if got != want:
        raise ValueError(
            f"latent_scales are {got} for {latent_pages.dtype} pages; want {want}: 8-bit pages "
            "come with two scales per token, wider pages with none"
        )
