"""Norms beyond the plain RMSNorm that every backend gives as `ops.rms_norm`."""

import jax
import jax.numpy as jnp

from jaxserve.core.ops import Ops


def centered_rms_norm(ops: Ops, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm whose stored weight is the distance from 1, as Gemma keeps it. x [..., E]."""
    return ops.rms_norm(x, 1.0 + weight.astype(jnp.float32), eps)
