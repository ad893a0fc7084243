"""Rotary position embedding (arXiv:2104.09864), given cosines and sines."""

import jax

from pallas_kernels.rope.cpu import rotate_cpu
from pallas_kernels.rope.reference import rotate_reference

_BACKENDS = {"reference": rotate_reference, "cpu": rotate_cpu}


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, backend: str = "reference"
) -> jax.Array:
    """Rotate the pairs (i, i + D/2) of every head. x [T, H, D]; cos, sin [T, D/2].

    The result has x's shape and dtype. On the backend "cpu" a head's bits depend on that head and
    its angles alone. Raises ValueError for shapes that do not fit, NotImplementedError for an
    unknown backend.
    """
    T, _, D = x.shape
    if D % 2 or cos.shape != (T, D // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cosines {cos.shape} and sines {sin.shape} do not fit {x.shape}; want {(T, D // 2)}"
        )
    if backend not in _BACKENDS:
        raise NotImplementedError(
            f"rope has no backend {backend!r}; it has: {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[backend](x, cos, sin)
