"""The gate on CPU, through the native kernel (cpu.cc)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.gated_activation.reference import gated_activation_reference

# As cpu.h numbers them.
NATIVE_FUNCTIONS = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1}


def gated_activation_cpu(gate_up: jax.Array, activation: str) -> jax.Array:
    """See `pallas_kernels.gated_activation.gated_activation`."""
    function = NATIVE_FUNCTIONS.get(activation)
    if function is None:
        return gated_activation_reference(gate_up, activation)
    native.module()
    flat = gate_up.reshape(math.prod(gate_up.shape[:-1]), gate_up.shape[-1]).astype(jnp.float32)
    out = jax.ShapeDtypeStruct((flat.shape[0], flat.shape[1] // 2), jnp.float32)
    y = jax.ffi.ffi_call("jaxserve_gated_activation", out)(flat, function=np.int64(function))
    return y.reshape(*gate_up.shape[:-1], out.shape[1]).astype(gate_up.dtype)
