"""Paged attention on CPU: one call that writes a layer's new keys and values and attends.

What is checked here are shapes and types; values (page ids, slots, lengths) are data that only the
step knows, so the native code clamps or skips those that point outside the arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native

MAX_HEAD_DIM = 1024
_PAGE_DTYPES = ("float32", "bfloat16", "int8")


def paged_attention_cpu(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    key_pages: jax.Array,
    value_pages: jax.Array,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
    write_slot: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """`write_kv` (k, v [T, K, D] at write_slot [T]; None: read only), then `paged_attention`.

    key_pages, value_pages [N, page_size, K, D] float32 or bfloat16, or int8 with key_scales and
    value_scales [N, page_size, K] float32. They are updated in place where the caller donates
    them. Returns (out [T, H, D] in q's dtype, key_pages, value_pages, key_scales, value_scales).

    A query's bits depend on its own row alone: on q, the keys and values in order and its
    position; not on T, chunking, the kind of row, neighbours, or the place of pages (cpu.cc).

    Raises ValueError for shapes and types that do not fit.
    """
    native.module()
    D = q.shape[2]
    scales = _scales(key_pages, value_pages, key_scales, value_scales)
    _check(
        q, k, v, key_pages, value_pages, write_slot, page_table,
        (query_starts, query_lens, kv_lens), sinks, tree_mask, decode_rows, width, window, softcap,
    )  # fmt: skip
    K = key_pages.shape[2]
    writes = k is not None
    new = (k, v) if writes else (jnp.zeros((0, K, D)), jnp.zeros((0, K, D)))
    pool = (key_pages, value_pages, *scales)
    arguments = (
        q.astype(jnp.float32),
        *(jnp.asarray(x, jnp.float32) for x in new),
        *(
            jnp.asarray(x, jnp.int32)
            for x in (write_slot, page_table, query_starts, query_lens, kv_lens)
        ),
        jnp.zeros(0) if sinks is None else jnp.asarray(sinks, jnp.float32),
        jnp.zeros((0, width, width), bool) if tree_mask is None else jnp.asarray(tree_mask, bool),
        *pool,
    )
    settings = _settings(decode_rows, width, scale, window, softcap)
    results = _call(arguments, pool if writes else (), settings)
    keys, values, *new_scales = results[1:] if writes else pool
    key_scales, value_scales = new_scales or (None, None)
    return results[0].astype(q.dtype), keys, values, key_scales, value_scales


def _settings(
    decode_rows: int, width: int, scale: float, window: int | None, softcap: float | None
) -> dict[str, Any]:
    """The call's attributes; 0 stands for no window and no cap."""
    return {
        "decode_rows": np.int64(decode_rows),
        "width": np.int64(width),
        "scale": np.float32(scale),
        "window": np.int64(window or 0),
        "softcap": np.float32(softcap or 0),
    }


def _call(
    arguments: tuple[jax.Array, ...],
    written: tuple[jax.Array, ...],
    settings: dict[str, Any],
) -> Any:
    """The native call: the output, like q, and `written`, the last arguments, updated in place."""
    out = jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)
    updated = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written)
    first = len(arguments) - len(written)
    return jax.ffi.ffi_call(
        "jaxserve_paged_attention",
        (out, *updated),
        input_output_aliases={first + i: 1 + i for i in range(len(updated))},
    )(*arguments, **settings)


def _scales(
    key_pages: jax.Array,
    value_pages: jax.Array,
    key_scales: jax.Array | None,
    value_scales: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Both scales of an int8 pool, nothing of another."""
    dtype = key_pages.dtype
    if dtype != value_pages.dtype or dtype.name not in _PAGE_DTYPES:
        raise ValueError(
            f"pages are {dtype} and {value_pages.dtype}; both must be one of {_PAGE_DTYPES}"
        )
    if dtype != jnp.int8:
        if key_scales is not None or value_scales is not None:
            raise ValueError(f"{dtype} pages take no scales; give None")
        return ()
    want = key_pages.shape[:3]
    for scales in (key_scales, value_scales):
        if scales is None or scales.shape != want or scales.dtype != jnp.float32:
            got = "None" if scales is None else f"{scales.dtype} {scales.shape}"
            raise ValueError(f"int8 pages need float32 scales of shape {want}, got {got}")
    return tuple(x for x in (key_scales, value_scales) if x is not None)


def _check(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    key_pages: jax.Array,
    value_pages: jax.Array,
    write_slot: jax.Array,
    page_table: jax.Array,
    lengths: tuple[jax.Array, jax.Array, jax.Array],
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    decode_rows: int,
    width: int,
    window: int | None,
    softcap: float | None,
) -> None:
    T, H, D = q.shape
    N, page_size, K, page_dim = key_pages.shape
    if key_pages.shape != value_pages.shape or page_dim != D or K < 1 or H < 1 or H % K:
        raise ValueError(
            f"queries {q.shape} do not fit pages {key_pages.shape} and {value_pages.shape}: "
            "head_dim must agree and query heads be a multiple of KV heads"
        )
    if N < 1 or page_size < 1:
        raise ValueError("the pool has no pages; page 0 must exist for padding to point at")
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {D}; the native attention takes 1 to {MAX_HEAD_DIM}")
    if (k is None) != (v is None):
        raise ValueError("give both k and v, or neither")
    for name, new in (("k", k), ("v", v)):
        if new is not None and new.shape != (T, K, D):
            raise ValueError(f"{name} is {new.shape}; {T} tokens into these pages need {(T, K, D)}")
    if write_slot.shape != (T,):
        raise ValueError(f"write_slot is {write_slot.shape}; {T} tokens need {(T,)}")
    R = page_table.shape[0]
    if any(x.shape != (R,) for x in lengths):
        shapes = [x.shape for x in lengths]
        raise ValueError(
            f"query_starts, query_lens and kv_lens are {shapes}; a page table of {R} rows needs "
            f"{(R,)}"
        )
    if width < 1 or not 0 <= decode_rows <= R or decode_rows * width > T:
        raise ValueError(
            f"{decode_rows} decode rows of width {width} do not fit {R} rows, {T} tokens and a "
            f"page table of shape {page_table.shape}"
        )
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks are {sinks.shape}; {H} heads need {(H,)}")
    if tree_mask is not None and tree_mask.shape != (decode_rows, width, width):
        want = (decode_rows, width, width)
        raise ValueError(f"tree_mask is {tree_mask.shape}; these rows need {want}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; give None or at least 1 (the query itself)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; give None or a positive number")
