"""Store new keys and values in their pages, in place when the pool is donated."""

import jax

from pallas_kernels.kv_write.reference import quantize_kv, write_kv_reference


def write_kv(
    key_pages: jax.Array,
    value_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slot: jax.Array,
    *,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    backend: str = "reference",
) -> tuple[jax.Array, ...]:
    """Write token t's k and v at flat slot write_slot[t]; negative slots write nothing.

    key_pages, value_pages [N, page_size, K, D]; k, v [T, K, D]; write_slot [T] int32.
    Slots of one call are distinct. 8-bit pages (int8, float8_e4m3fn) hold codes of absmax / 127 or
    448 per token and head, and come with key_scales, value_scales [N, page_size, K] float32, then
    also returned.
    Returns (key_pages, value_pages[, key_scales, value_scales]).

    Raises NotImplementedError for an unknown backend and ValueError for shapes that do not fit.
    """
    if key_pages.shape[2:] != k.shape[1:] or key_pages.shape != value_pages.shape:
        raise ValueError(
            f"pages {key_pages.shape} and {value_pages.shape} do not take keys of shape {k.shape}"
        )
    if backend != "reference":
        raise NotImplementedError(f"kv_write has no backend {backend!r}; it has: reference")
    if key_scales is None or value_scales is None:
        return write_kv_reference((key_pages, value_pages), (k, v), write_slot)
    k, new_key_scales = quantize_kv(k, key_pages.dtype)
    v, new_value_scales = quantize_kv(v, value_pages.dtype)
    pool = (key_pages, value_pages, key_scales, value_scales)
    return write_kv_reference(pool, (k, v, new_key_scales, new_value_scales), write_slot)
