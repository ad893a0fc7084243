"""The backends an engine can run on, each a bundle of pure functions made once at start."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ATTENTION_BACKENDS
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import STACKED
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Attend, Linear, Ops
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

PAGE_SIZES = (16, 32, 64, 128)  # that the kernels for stacked pools take
MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 16
_COMPILED_HEAD_DIMS = (64, 128)  # for which the prefill kernel's layouts are found
_HOPPER = "9.0"
_TOO_NEW = (0, 12)  # its layout inference searches for minutes where the decode kernel transposes
_DEFAULT_PAGE_SIZE = {"reference": 16, "cpu": 16, "mosaic_gpu": 64, "interpret": 64}
# Whose kernels the small operations are; XLA fuses them on a GPU.
_SMALL = {name: "cpu" if name == "cpu" else "reference" for name in ATTENTION_BACKENDS[1:]}
# Made once, because ops are compared: equal engines share programs.
_NORMS = {name: partial(rms_norm, backend=small) for name, small in _SMALL.items()}
_ROTATIONS = {name: partial(rotate, backend=small) for name, small in _SMALL.items()}
_SUMS = {name: partial(row_sum, backend=small) for name, small in _SMALL.items()}


def choose_backend(backend: str, device: jax.Device | None = None) -> str:
    """The backend that "auto" stands for on a device (None: JAX's first); others as they are.

    Raises NotImplementedError, naming what exists and what would help, for one that cannot run.
    """
    if backend not in ATTENTION_BACKENDS:
        raise NotImplementedError(
            f"there is no attention backend {backend!r}; choose {', '.join(ATTENTION_BACKENDS)}"
        )
    device = device or jax.devices()[0]
    if backend == "auto":
        if device.platform == "gpu":
            return "reference" if _no_gpu_kernels(device) else "mosaic_gpu"
        return "reference" if _no_native_kernels(device) else "cpu"
    problem = {
        "cpu": _no_native_kernels(device),
        "mosaic_gpu": _no_gpu_kernels(device),
        "interpret": f"it runs on a CPU, and JAX on {_name(device)}; choose mosaic_gpu or reference"
        if device.platform != "cpu"
        else None,
    }.get(backend)
    if problem is not None:
        raise NotImplementedError(f"the attention backend {backend} cannot run here: {problem}")
    return backend


def why_reference(device: jax.Device) -> str | None:
    """Why "auto" is the reference on this device; None where it is not."""
    if choose_backend("auto", device) != "reference":
        return None
    return _no_gpu_kernels(device) if device.platform == "gpu" else _no_native_kernels(device)


def refusal(kv_spec: KVSpec, dtype: np.dtype, page_size: int, backend: str) -> str | None:
    """What of a model or of settings the kernels for stacked pools do not take, and what would
    work instead; None if they take it. The interpreter takes more than the compilers do."""
    odd = {group.head_dim for group in kv_spec.groups} - set(_COMPILED_HEAD_DIMS)
    if odd and backend == "mosaic_gpu":
        return (
            f"the model has a head_dim of {min(odd)}, and the GPU's prefill kernel compiles for "
            f"{', '.join(map(str, _COMPILED_HEAD_DIMS))}; choose --attention-backend reference"
        )
    odd = {group.head_dim for group in kv_spec.groups} - set(
        range(_HEAD_DIM_STEP, MAX_HEAD_DIM + 1, _HEAD_DIM_STEP)
    )
    if odd:
        return (
            f"the model has a head_dim of {min(odd)}, and the GPU kernels take multiples of "
            f"{_HEAD_DIM_STEP} up to {MAX_HEAD_DIM}; choose --attention-backend reference"
        )
    if dtype != jnp.bfloat16:
        return (
            f"dtype is {dtype.name}, and the GPU kernels compute in bfloat16; choose --dtype "
            "bfloat16, or --attention-backend reference"
        )
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"page_size is {page_size}; the GPU kernels take {sizes}"
    return None


def default_page_size(backend: str) -> int:
    """Tokens of a page where nobody says how many; "auto" as `choose_backend` takes it."""
    return _DEFAULT_PAGE_SIZE[choose_backend(backend) if backend == "auto" else backend]


def weight_layout(backend: str) -> str | None:
    """How the backend wants packable weights kept; None: expanded, as plain arrays."""
    chosen = choose_backend(backend)
    return "panels" if chosen == "cpu" else "gpu" if chosen in STACKED else None


def make_ops(backend: str, kv_spec: KVSpec, num_devices: int = 1) -> Ops:
    """The ops of a backend; "auto" stands for what `choose_backend` says.

    num_devices: that the pool is split over. Nothing is asked about GPUs, so that programs for one
    can be compiled elsewhere; else it raises NotImplementedError as `choose_backend` does.
    """
    if backend != "mosaic_gpu":
        backend = choose_backend(backend)
    layout = kv_layout(kv_spec)
    attend: Attend = PagedAttend(layout, backend)
    if backend in STACKED:
        from jaxserve.core.stacked_attend import StackedAttend  # brings Pallas, which takes a while

        attend = StackedAttend(layout, num_devices, interpret=backend == "interpret")
    return Ops(
        name=backend,
        attend=attend,
        linear=_LINEAR[backend],
        rms_norm=_NORMS[backend],
        embed=_EMBED[backend],
        gated_linear=_GATED[backend],
        rotate=_ROTATIONS[backend],
        row_sum=_SUMS[backend],
    )


def _no_native_kernels(device: jax.Device) -> str | None:
    return native.why_not() if device.platform == "cpu" else f"JAX runs on {_name(device)}"


def _no_gpu_kernels(device: jax.Device) -> str | None:
    """None on a GPU of compute capability 9.0, whose instructions the kernels are made of, under a
    JAX that compiles them."""
    if device.platform != "gpu":
        return f"it wants an NVIDIA Hopper GPU, and JAX runs on {_name(device)}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability == _HOPPER:
        if jax.__version_info__ < _TOO_NEW:
            return None
        return (
            f"this is jax {jax.__version__}, which does not find layouts for its kernels; install "
            "jaxserve[gpu], which brings a version before 0.12"
        )
    return (
        f"its kernels are for NVIDIA Hopper GPUs (compute capability {_HOPPER}), and "
        f"{device.device_kind} has {capability}; it runs on XLA's kernels, the backend reference"
    )


def _name(device: jax.Device) -> str:
    return "a CPU" if device.platform == "cpu" else device.device_kind


def embed(table: Any, tokens: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Rows of table [V, E] for tokens [T]. The host has checked the ids; padding may hold any.

    dtype: of rows that were packed, and so of all activations after them; None: float32.
    """
    if isinstance(table, QuantizedArray | StackedRows):
        return take_rows(table, tokens).astype(dtype or jnp.float32)
    return jnp.take(table, tokens, axis=0, mode="clip")


def linear(
    x: jax.Array,
    w: Any,
    bias: jax.Array | None = None,
    add_to: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """x [..., K] times w [N, K], plus bias [N]; accumulated in float32. w may be packed.

    add_to [..., N]: what the result is added to, which costs no further way through memory.
    interpret: GPU kernels on a CPU, for tests.
    Both last axes are contracted: on XLA:CPU that runs up to twice as fast for few rows, and the
    rows of the result do not depend on how many there are, from two rows up.
    """
    if isinstance(w, QuantizedArray | StackedRows):
        fused = bias is None and add_to is not None and add_to.dtype == x.dtype == jnp.float32
        rounded = x.dtype if bias is None else jnp.float32  # where the kernel can, on its way out
        y = matmul(x, w, add_to if fused else None, out_dtype=rounded, interpret=interpret)
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
    return gated_activation(_LINEAR[backend](x, w, bias), activation, backend=_SMALL[backend])


# GPU kernels compute in bfloat16.
_EMBED = {name: partial(embed, dtype="bfloat16") if name in STACKED else embed for name in _SMALL}
_LINEAR: dict[str, Linear] = {
    name: partial(linear, interpret=True) if name == "interpret" else linear for name in _SMALL
}
_GATED = {name: partial(gated_linear, backend=name) for name in _SMALL}
