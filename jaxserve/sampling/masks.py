"""Per-request edits of single logits: ids that may not be drawn yet, and the user's bias."""

import jax
import jax.numpy as jnp


def suppress(logits: jax.Array, ids: jax.Array, applies: jax.Array) -> jax.Array:
    """Set logits[s, ids[s]] to -inf in rows where `applies` [S]; ids [S, M], -1 is padding."""
    return _at(logits, ids, applies).set(-jnp.inf, mode="drop")


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Add values[s, m] to logits[s, ids[s, m]]; ids [S, M], -1 is padding."""
    every_row = jnp.ones(logits.shape[0], bool)
    return _at(logits, ids, every_row).add(values, mode="drop")


def _at(logits: jax.Array, ids: jax.Array, applies: jax.Array) -> jax.core.Tracer:
    """A reference to entries of each row; padding is sent past the end, where writes are dropped
    (a negative index would wrap around)."""
    rows, width = logits.shape
    valid = (ids >= 0) & applies[:, None]
    return logits.at[jnp.arange(rows)[:, None], jnp.where(valid, ids, width)]
