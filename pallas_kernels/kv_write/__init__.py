"""Store new keys and values in their pages, in place when the pool is donated."""

import jax

from pallas_kernels.kv_write.reference import write_kv_reference


def write_kv(
    key_pages: jax.Array,
    value_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slot: jax.Array,
    *,
    backend: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Write token t's k and v at flat slot write_slot[t]; negative slots write nothing.

    key_pages, value_pages [N, page_size, K, D]; k, v [T, K, D]; write_slot [T] int32.
    Slots of one call are distinct. Raises NotImplementedError for an unknown backend and
    ValueError for shapes that do not fit.
    """
    if key_pages.shape[2:] != k.shape[1:] or key_pages.shape != value_pages.shape:
        raise ValueError(
            f"pages {key_pages.shape} and {value_pages.shape} do not take keys of shape {k.shape}"
        )
    if backend != "reference":
        raise NotImplementedError(f"kv_write has no backend {backend!r}; it has: reference")
    return write_kv_reference(key_pages, value_pages, k, v, write_slot)
