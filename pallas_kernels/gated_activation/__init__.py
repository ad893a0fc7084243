"""The gate of a feed-forward layer: activation(gate) * up, both halves of one product."""

import jax

from pallas_kernels.gated_activation.cpu import gated_activation_cpu
from pallas_kernels.gated_activation.reference import ACTIVATIONS, gated_activation_reference

__all__ = ["ACTIVATIONS", "gated_activation"]

_BACKENDS = {"reference": gated_activation_reference, "cpu": gated_activation_cpu}


def gated_activation(
    gate_up: jax.Array, activation: str, *, backend: str = "reference"
) -> jax.Array:
    """activation(gate) * up of gate_up [..., 2F], gate first: [..., F] in its dtype.

    activation: a name of ACTIVATIONS (config.json's hidden_act). On the backend "cpu" a number's
    bits depend on that number alone; activations it has no kernel for run on the reference.
    Raises ValueError for an odd last axis or an unknown activation, NotImplementedError for an
    unknown backend.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up are halves of the last axis, which is odd: {gate_up.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    if backend not in _BACKENDS:
        raise NotImplementedError(
            f"gated_activation has no backend {backend!r}; it has: {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[backend](gate_up, activation)
