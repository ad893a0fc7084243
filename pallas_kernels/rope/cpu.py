"""The rotation on CPU, through the native kernel (cpu.cc)."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def rotate_cpu(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """See `pallas_kernels.rope.rotate`."""
    native.module()
    wide = [part.astype(jnp.float32) for part in (x, cos, sin)]
    call = jax.ffi.ffi_call("jaxserve_rope", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(*wide).astype(x.dtype)
