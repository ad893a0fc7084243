"""The meaning of the rotation, in plain jnp."""

import jax
import jax.numpy as jnp


def rotate_reference(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """See `pallas_kernels.rope.rotate`."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
