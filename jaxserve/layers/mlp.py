"""The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202) with gate and up in one matrix."""

from typing import Any

import jax

from jaxserve.core.ops import Ops


def gated_mlp(
    ops: Ops,
    activation: str,
    x: jax.Array,
    gate_up: Any,
    down: Any,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    add_to: jax.Array | None = None,
) -> jax.Array:
    """down(activation(gate(x)) * up(x)), plus add_to [T, E] if given.

    x [T, E]; gate_up [2F, E], gate first; down [E, F]. One product for gate and up reads the
    activations once and gives XLA:CPU a larger matrix, which matters for the few rows of a decode
    step.
    """
    gated = ops.gated_linear(x, gate_up, activation, gate_up_bias)
    return ops.linear(gated, down, down_bias, add_to)
