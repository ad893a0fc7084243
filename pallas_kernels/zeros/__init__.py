"""Zeros for large pools."""

import jax

from pallas_kernels.zeros.cpu import zeros_cpu
from pallas_kernels.zeros.reference import zeros_reference

_BACKENDS = {"reference": zeros_reference, "cpu": zeros_cpu}


def zeros(shape: jax.ShapeDtypeStruct, *, backend: str = "reference") -> jax.Array:
    """An array of zeros of the given shape and dtype.

    On the backend "cpu" its pages are not touched: they take no time now, and memory only when
    something is first written to or read from them. Raises NotImplementedError for an unknown
    backend.
    """
    if backend not in _BACKENDS:
        raise NotImplementedError(
            f"zeros has no backend {backend!r}; it has: {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[backend](shape)
