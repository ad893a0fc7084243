"""The sum of each row, which normalises probabilities."""

import jax
import jax.numpy as jnp

from pallas_kernels.row_sum.cpu import row_sum_cpu
from pallas_kernels.row_sum.reference import row_sum_reference

_BACKENDS = {"reference": row_sum_reference, "cpu": row_sum_cpu}


def row_sum(x: jax.Array, *, backend: str = "reference") -> jax.Array:
    """Sums over the last axis of x [R, N], float32 [R]. NaN and infinities pass through.

    On the backend "cpu" a row's sum depends on that row alone. Raises ValueError unless x is a
    float32 matrix, NotImplementedError for an unknown backend.
    """
    if x.ndim != 2 or x.dtype != jnp.float32:
        raise ValueError(f"row_sum takes float32 [R, N], got {x.dtype} {x.shape}")
    if backend not in _BACKENDS:
        raise NotImplementedError(
            f"row_sum has no backend {backend!r}; it has: {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[backend](x)
