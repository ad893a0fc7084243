"""The meaning of the norm, in plain jnp."""

import jax
import jax.numpy as jnp


def rms_norm_reference(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """See `pallas_kernels.rms_norm.rms_norm`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
