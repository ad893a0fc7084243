"""The logits that come out of the vocabulary's matrix."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.ops import Ops


def logits(ops: Ops, hidden: jax.Array, table: Any, softcap: float | None = None) -> jax.Array:
    """hidden [S, E] against table [V, E], float32 [S, V]; softcap c maps x to c * tanh(x / c)."""
    scores = ops.linear(hidden, table, None).astype(jnp.float32)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
