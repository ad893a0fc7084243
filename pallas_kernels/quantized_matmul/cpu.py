"""The packed product on CPU: panels, and the calls into the native kernels (cpu.cc).

A panel is 32 output rows side by side: for each input, 32 neighbouring codes, so that a vector
holds one input's weights of several outputs. Per format a panel is a sequence of blocks of inputs,
each with its scales [32], minima or zero points [32] and codes; q4_k's and q5_k's 6-bit scales
take a byte each (2.8 % more), all else keeps its own size. Rows past N in the last panel are zero.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.gated_activation.cpu import NATIVE_FUNCTIONS
from pallas_kernels.native.memory import Regions
from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.checks import check_array
from pallas_kernels.quantized_matmul.formats import Format

PANEL = 32
_BYTES_PER_JOB = 1 << 20
_REGIONS = Regions()


def supports(w: QuantizedArray) -> bool:
    """Whether there are native kernels for w's format and group: 4-bit codes come in eights."""
    return w.format_name != "int4" or w.group % 8 == 0


def pack_panels(w: QuantizedArray) -> QuantizedArray:
    """w in the layout "rows" (already checked) as panels, in host memory.

    Raises RuntimeError without native kernels, ValueError for a group they cannot read.
    """
    if not supports(w):
        raise ValueError(f"int4 panels need groups of a multiple of 8 inputs, got {w.group}")
    extension = native.module()
    N, K = w.shape
    form = w.format
    codes = np.ascontiguousarray(w.parts[_CODES[form.kind]])
    scales = np.ascontiguousarray(w.parts["scales"]) if form.kind == "grouped" else None
    zeros = np.ascontiguousarray(w.parts["zeros"]) if "zeros" in w.parts else None
    num_panels, panel_bytes = panels_shape(form, N, K, w.group)
    panels = _REGIONS.empty(num_panels * panel_bytes).reshape(num_panels, panel_bytes)

    def pack(first: int) -> None:
        last = min(first + step, num_panels)
        extension.pack_panels(
            form.native_id, N, K, w.group, codes.nbytes // N, _address(codes), _address(scales),
            _address(zeros), first, last, _address(panels[first:]),
        )  # fmt: skip

    step = max(1, _BYTES_PER_JOB // panel_bytes)
    jobs = range(0, num_panels, step)
    if len(jobs) == 1:
        pack(0)
    else:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(pack, jobs))
    parts = {"panels": panels} | {k: v for k, v in w.parts.items() if k == "perm"}
    return QuantizedArray(parts, w.format_name, w.shape, w.group, "panels")


_CODES = {"dense": "values", "grouped": "codes", "blocks": "blocks"}


def panels_shape(form: Format, N: int, K: int, group: int) -> tuple[int, int]:
    """[panels, bytes of one] for a matrix [N, K]."""
    panel_bytes = native.module().panel_bytes(form.native_id, K, group)
    return -(-N // PANEL), int(panel_bytes)


def matmul_panels(x: jax.Array, w: QuantizedArray, add_to: jax.Array | None = None) -> jax.Array:
    """x [..., K] float32 times panels of [N, K], plus add_to [..., N] float32: float32 [..., N].

    The sum over inputs has one order, whatever the number of rows: a row's bits depend on that row
    alone (cpu.cc says which order). Raises ValueError for panels that are not w's.
    """
    N, K = w.shape
    panels = _panels(w)
    flat = x.reshape(math.prod(x.shape[:-1]), K)
    out = jax.ShapeDtypeStruct((flat.shape[0], N), jnp.float32)
    if add_to is None:
        y = jax.ffi.ffi_call("jaxserve_matmul", out)(flat, panels, **_attributes(w))
    else:
        call = jax.ffi.ffi_call("jaxserve_matmul_add", out)
        y = call(flat, panels, add_to.reshape(out.shape), **_attributes(w))
    return y.reshape(*x.shape[:-1], N)


def can_gate(w: QuantizedArray, activation: str) -> bool:
    """Whether `gated_matmul_panels` takes w: both halves must be whole panels."""
    return w.shape[0] % (2 * PANEL) == 0 and activation in NATIVE_FUNCTIONS


def gated_matmul_panels(x: jax.Array, w: QuantizedArray, activation: str) -> jax.Array:
    """activation(gate) * up of the two halves of x [..., K] times panels of [2F, K]: [..., F].

    Bit for bit what the product and the gate say one after the other, without the halves going
    through memory. Raises ValueError for panels that are not w's.
    """
    N, K = w.shape
    panels = _panels(w)
    flat = x.reshape(math.prod(x.shape[:-1]), K)
    out = jax.ShapeDtypeStruct((flat.shape[0], N // 2), jnp.float32)
    function = np.int64(NATIVE_FUNCTIONS[activation])
    call = jax.ffi.ffi_call("jaxserve_gated_matmul", out)
    return call(flat, panels, function=function, **_attributes(w)).reshape(*x.shape[:-1], N // 2)


def take_rows_panels(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Rows [T] int32 of panels of [N, K], expanded: float32 [T, K]. Ids are clipped."""
    out = jax.ShapeDtypeStruct((rows.shape[0], w.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_take_rows", out)
    return call(rows.astype(jnp.int32), _panels(w), **_attributes(w))


def _panels(w: QuantizedArray) -> jax.Array:
    check_array(w)
    panels = w.parts["panels"]
    want = panels_shape(w.format, *w.shape, w.group)
    if panels.shape != want or panels.dtype != jnp.uint8:
        raise ValueError(
            f"{w.format_name} panels of {w.shape} are uint8 {want}, "
            f"got {panels.dtype} {panels.shape}"
        )
    return panels


def _attributes(w: QuantizedArray) -> dict[str, np.int64]:
    N, K = w.shape
    values = {"format": w.format.native_id, "group": w.group, "n": N, "k": K}
    return {name: np.int64(value) for name, value in values.items()}


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data
