"""The norm on CPU, through the native kernel (cpu.cc)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native


def rms_norm_cpu(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """See `pallas_kernels.rms_norm.rms_norm`. Raises RuntimeError without native kernels."""
    native.module()
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_rms_norm", jax.ShapeDtypeStruct(flat.shape, jnp.float32))
    out = call(flat, weight.astype(jnp.float32), eps=np.float32(eps))
    return out.reshape(x.shape).astype(x.dtype)
