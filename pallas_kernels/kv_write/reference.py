"""The meaning of kv_write: a scatter that drops negative slots."""

import jax
import jax.numpy as jnp


def write_kv_reference(
    pool: tuple[jax.Array, ...], new: tuple[jax.Array, ...], write_slot: jax.Array
) -> tuple[jax.Array, ...]:
    """Each array of the pool [N, page_size, ...] with rows of new [T, ...] at write_slot [T].

    Bytes: each new key and value is read and written once.
    """

    def scatter(pages: jax.Array, rows: jax.Array) -> jax.Array:
        num_slots = pages.shape[0] * pages.shape[1]
        # JAX wraps negative indices, so "write nothing" must become an index past the end.
        slots = jnp.where(write_slot < 0, num_slots, write_slot)
        flat = pages.reshape(num_slots, *pages.shape[2:])
        flat = flat.at[slots].set(rows.astype(pages.dtype), mode="drop", unique_indices=False)
        return flat.reshape(pages.shape)

    return tuple(scatter(pages, rows) for pages, rows in zip(pool, new, strict=True))


# Largest code of each 8-bit format; a scale is a head's largest absolute number by it.
TOP_CODE = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.float8_e4m3fn): 448}


def quantize_kv(
    x: jax.Array, dtype: jax.typing.DTypeLike = jnp.int8
) -> tuple[jax.Array, jax.Array]:
    """x [T, K, D] as codes of dtype and float32 scales [T, K], absmax by the largest code.

    What is not finite gets a NaN scale, so that the row is seen to have failed.
    """
    wide = x.astype(jnp.float32)
    # Products, since XLA makes such of these quotients and every backend must round the same way.
    scale = jnp.max(jnp.abs(wide), axis=-1) * (1 / TOP_CODE[jnp.dtype(dtype)])
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)
    codes = wide * (1 / jnp.where(scale == 0, 1, scale))[..., None]
    codes = jnp.round(codes) if jnp.dtype(dtype) == jnp.int8 else codes
    finite = jnp.isfinite(wide).all(-1)
    codes = jnp.where(finite[..., None], codes, 0).astype(dtype)
    return codes, jnp.where(finite, scale, jnp.nan)
