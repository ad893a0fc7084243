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
) -> jax.Array:
    """down(activation(gate(x)) * up(x)). x [T, E]; gate_up [2F, E], gate first; down [E, F].

    One product for gate and up reads the activations once and gives XLA:CPU a larger matrix,
    which matters for the few rows of a decode step.
    """
    both = ops.linear(x, gate_up, gate_up_bias)
    return ops.linear(ops.gated_activation(both, activation), down, down_bias)
