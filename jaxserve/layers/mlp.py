"""The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202) with gate and up in one matrix."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.ops import Ops

Activation = Callable[[jax.Array], jax.Array]

# Names as in the hidden_act entry of config.json.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def gated_mlp(
    ops: Ops,
    activation: str,
    x: jax.Array,
    gate_up: Any,
    down: Any,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """down(activation(gate(x)) * up(x)). x [T, E]; gate_up [2F, E], gate first; down [E, F].

    One product for gate and up reads the activations once and gives XLA:CPU a larger matrix,
    which matters for the few rows of a decode step.
    """
    gate, up = jnp.split(ops.linear(x, gate_up, gate_up_bias), 2, axis=-1)
    return ops.linear(ACTIVATIONS[activation](gate) * up, down, down_bias)
