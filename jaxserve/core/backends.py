"""The backends an engine can run on, each a bundle of pure functions made once at start."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.paged_attend import PagedAttend
from pallas_kernels import native
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.quantized_matmul import (
    QuantizedArray,
    StackedRows,
    gated_matmul,
    matmul,
    take_rows,
)
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rotate
from pallas_kernels.row_sum import row_sum

BACKENDS = ("auto", "reference", "cpu")
# Made once, because ops are compared: equal engines share programs.
_NORMS = {backend: partial(rms_norm, backend=backend) for backend in BACKENDS[1:]}
_ROTATIONS = {backend: partial(rotate, backend=backend) for backend in BACKENDS[1:]}
_SUMS = {backend: partial(row_sum, backend=backend) for backend in BACKENDS[1:]}


def choose_backend(backend: str) -> str:
    """The backend that "auto" stands for on this machine; any other name as it is.

    Raises NotImplementedError, naming what exists and what would help, for one that cannot run.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(
            f"there is no attention backend {backend!r}; choose {', '.join(BACKENDS)}"
        )
    problem = _no_native_kernels()
    if backend == "auto":
        return "cpu" if problem is None else "reference"
    if backend == "cpu" and problem is not None:
        raise NotImplementedError(f"the attention backend cpu cannot run here: {problem}")
    return backend


def weight_layout(backend: str) -> str | None:
    """How the backend wants packable weights kept; None: expanded, as plain arrays."""
    return "panels" if choose_backend(backend) == "cpu" else None


def make_ops(backend: str, kv_spec: KVSpec) -> Ops:
    """The ops of a backend. "auto" takes the best one that exists for this machine.

    Raises NotImplementedError as `choose_backend` does.
    """
    backend = choose_backend(backend)
    return Ops(
        name=backend,
        attend=PagedAttend(kv_layout(kv_spec), backend),
        linear=linear,
        rms_norm=_NORMS[backend],
        embed=embed,
        gated_linear=_GATED[backend],
        rotate=_ROTATIONS[backend],
        row_sum=_SUMS[backend],
    )


def _no_native_kernels() -> str | None:
    if jax.default_backend() != "cpu":
        return f"JAX runs on {jax.default_backend()}"
    return native.why_not()


def embed(table: Any, tokens: jax.Array) -> jax.Array:
    """Rows of table [V, E] for tokens [T]. The host has checked the ids; padding may hold any."""
    if isinstance(table, QuantizedArray | StackedRows):
        return take_rows(table, tokens)
    return jnp.take(table, tokens, axis=0, mode="clip")


def linear(
    x: jax.Array, w: Any, bias: jax.Array | None = None, add_to: jax.Array | None = None
) -> jax.Array:
    """x [..., K] times w [N, K], plus bias [N]; accumulated in float32. w may be packed.

    add_to [..., N]: what the result is added to, which costs no further way through memory.
    Both last axes are contracted: on XLA:CPU that runs up to twice as fast for few rows, and the
    rows of the result do not depend on how many there are, from two rows up.
    """
    if isinstance(w, QuantizedArray | StackedRows):
        fused = bias is None and add_to is not None and add_to.dtype == x.dtype == jnp.float32
        y = matmul(x, w, add_to if fused else None)
        if fused:
            return y
    else:
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        y = jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = y.astype(x.dtype)
    return y if add_to is None else add_to + y


def gated_linear(
    x: jax.Array, w: Any, activation: str, bias: jax.Array | None = None, *, backend: str
) -> jax.Array:
    """activation(gate) * up [..., F]: gate and up are the halves of linear(x, w [2F, K], bias)."""
    if isinstance(w, QuantizedArray | StackedRows) and bias is None and x.dtype == jnp.float32:
        return gated_matmul(x, w, activation)
    return gated_activation(linear(x, w, bias), activation, backend=backend)


_GATED = {backend: partial(gated_linear, backend=backend) for backend in BACKENDS[1:]}
