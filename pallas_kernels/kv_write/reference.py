"""The meaning of kv_write: a scatter that drops negative slots."""

import jax
import jax.numpy as jnp


def write_kv_reference(
    key_pages: jax.Array,
    value_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slot: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `write_kv`. Bytes: each new key and value is read and written once."""
    num_slots = key_pages.shape[0] * key_pages.shape[1]
    # JAX wraps negative indices, so "write nothing" must become an index past the end.
    slots = jnp.where(write_slot < 0, num_slots, write_slot)

    def scatter(pages: jax.Array, new: jax.Array) -> jax.Array:
        flat = pages.reshape(num_slots, *pages.shape[2:])
        flat = flat.at[slots].set(new.astype(pages.dtype), mode="drop", unique_indices=False)
        return flat.reshape(pages.shape)

    return scatter(key_pages, k), scatter(value_pages, v)
