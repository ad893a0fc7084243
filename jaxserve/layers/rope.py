"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): the part that runs in the step.

How the frequencies of a checkpoint are found is in `rope_scaling`. Nothing here is a table over
positions: cosine and sine are computed from each token's own position, so any context length
works and a row's result depends on that row alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the position once the trained context is used up (NTK by length).

    A token at position p is rotated with the frequencies of a sequence of p + 1 tokens: what
    transformers gives when the sequence is fed token by token. So a cached key depends on its own
    position and never changes, whatever the chunking, and pages may be shared between requests.
    """

    factor: float
    original_length: int


@dataclass(frozen=True)
class Rope:
    """Static rotation of one kind of layer: a frequency for each of the head_dim / 2 pairs."""

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    dynamic: DynamicScaling | None = None

    @property
    def head_dim(self) -> int:
        return 2 * len(self.inv_freq)


def cos_and_sin(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every pair's angle, float32, each [T, head_dim / 2].

    positions [T] int. The angle is the float32 product of position and frequency, as in
    transformers: models are trained with its rounding, which reaches 0.004 at position 131071.
    """
    inv_freq = jnp.asarray(np.asarray(rope.inv_freq, np.float32))  # [D/2]
    position = positions.astype(jnp.float32)[:, None]  # [T, 1]
    if rope.dynamic is not None:
        inv_freq = inv_freq * _dynamic_divisor(rope.dynamic, rope.head_dim, position)
    angle = position * inv_freq
    return jnp.cos(angle) * rope.attention_scaling, jnp.sin(angle) * rope.attention_scaling


def _dynamic_divisor(scaling: DynamicScaling, head_dim: int, position: jax.Array) -> jax.Array:
    """What each frequency is multiplied by, [T, D/2]; exactly 1 within the trained context.

    The base is multiplied by s ** (D / (D - 2)), so pair i's frequency by s ** (-2 i / (D - 2)).
    """
    length = jnp.maximum(position + 1.0, scaling.original_length)
    stretch = scaling.factor * length / scaling.original_length - (scaling.factor - 1.0)
    exponent = -np.arange(0, head_dim, 2) / (head_dim - 2)
    return jnp.exp(jnp.log(stretch) * jnp.asarray(exponent, jnp.float32))
