"""The meaning of the gate, in plain jnp."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

# Names as in the hidden_act entry of config.json.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def gated_activation_reference(gate_up: jax.Array, activation: str) -> jax.Array:
    """See `pallas_kernels.gated_activation.gated_activation`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
