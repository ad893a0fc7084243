"""Root-mean-square norm of the last axis."""

import jax

from pallas_kernels.rms_norm.cpu import rms_norm_cpu
from pallas_kernels.rms_norm.reference import rms_norm_reference

_BACKENDS = {"reference": rms_norm_reference, "cpu": rms_norm_cpu}


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, backend: str = "reference"
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467), in float32.

    x [..., E], weight [E]; the result has x's shape and dtype. On the backend "cpu" a row's bits
    depend on the row alone. Raises ValueError when the weight does not fit, NotImplementedError
    for an unknown backend.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a norm's weight {weight.shape} does not fit the last axis of {x.shape}")
    if backend not in _BACKENDS:
        raise NotImplementedError(
            f"rms_norm has no backend {backend!r}; it has: {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[backend](x, weight, eps)
