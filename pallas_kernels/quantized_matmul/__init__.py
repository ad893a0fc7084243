"""Products with weight matrices that stay packed, and rows taken out of them."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.quantized_matmul.array import QuantizedArray, StackedRows
from pallas_kernels.quantized_matmul.checks import check_array
from pallas_kernels.quantized_matmul.cpu import (
    can_gate,
    gated_matmul_panels,
    matmul_panels,
    pack_panels,
    panels_shape,
    take_rows_panels,
)
from pallas_kernels.quantized_matmul.formats import FORMATS, Format
from pallas_kernels.quantized_matmul.gpu_layout import LAYOUTS as GPU_LAYOUTS
from pallas_kernels.quantized_matmul.gpu_layout import gpu_layout, pack_gpu, part_shapes
from pallas_kernels.quantized_matmul.reference import (
    dequantize,
    in_input_order,
    matmul_reference,
    take_rows_reference,
)

__all__ = [
    "FORMATS",
    "ExpertRows",
    "Format",
    "QuantizedArray",
    "StackedRows",
    "check_array",
    "dequantize",
    "expert_matmul",
    "gated_matmul",
    "group_by_expert",
    "matmul",
    "matmul_gpu",
    "repack",
    "repack_shape",
    "take_rows",
]


_LAYOUTS = ("rows", "panels", *GPU_LAYOUTS)
# What needs the GPU side of Pallas, whose import takes half a second, comes when it is asked for.
_ON_GPUS = {
    "ExpertRows": "experts",
    "expert_matmul": "experts",
    "group_by_expert": "experts",
    "matmul_gpu": "mosaic_gpu",
    "take_rows_gpu": "mosaic_gpu",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_GPUS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_GPUS[name]}"), name)


def matmul(
    x: jax.Array,
    w: QuantizedArray | StackedRows,
    add_to: jax.Array | None = None,
    *,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """x [..., K] times packed w [N, K], plus add_to [..., N] float32 if given: [..., N] of
    out_dtype, summed in float32.

    Activations stay float32 (bfloat16 ones are widened), and every weight is expanded to the
    float32 number it stands for before it is multiplied. The array's layout says which backend
    runs: "rows" the reference, "panels" the native CPU kernels, "gpu" those for Hopper GPUs, which
    round activations to 16 bits ("gpu_w8a8": to 8 bits) and run on a CPU with `interpret`.

    Raises ValueError for shapes that do not fit and NotImplementedError for an unknown layout.
    """
    _check_fits(x, w)
    if add_to is not None and (add_to.shape[-1] != w.shape[0] or add_to.dtype != jnp.float32):
        raise ValueError(
            f"a product with a matrix {w.shape} is added to float32 [..., {w.shape[0]}], "
            f"got {add_to.dtype} {add_to.shape}"
        )
    if isinstance(w, QuantizedArray) and w.layout == "panels":
        return matmul_panels(_inputs(x, w), w, add_to).astype(out_dtype)
    summed = out_dtype if add_to is None else jnp.float32
    if isinstance(w, StackedRows):
        pieces = [matmul(x, piece, out_dtype=summed, interpret=interpret) for piece in w.pieces]
        y = jnp.concatenate(pieces, axis=-1)
    elif w.layout == "rows":
        y = matmul_reference(_inputs(x, w), w)
    elif w.layout in GPU_LAYOUTS:
        from pallas_kernels.quantized_matmul.mosaic_gpu import matmul_gpu

        y = matmul_gpu(x, w, out_dtype=summed, interpret=interpret)
    else:
        raise NotImplementedError(
            f"quantized_matmul has no layout {w.layout!r}; it has: {', '.join(_LAYOUTS)}"
        )
    return (y if add_to is None else add_to + y).astype(out_dtype)


def gated_matmul(
    x: jax.Array, w: QuantizedArray | StackedRows, activation: str, *, interpret: bool = False
) -> jax.Array:
    """activation(gate) * up, which are the halves of x [..., K] times packed w [2F, K]: [..., F].

    activation: a name of `pallas_kernels.gated_activation`. Raises ValueError as `matmul` and
    `gated_activation` do, NotImplementedError for an unknown layout. interpret: as in `matmul`.
    """
    panels = (w if isinstance(w, QuantizedArray) else w.pieces[0]).layout == "panels"
    if isinstance(w, QuantizedArray) and panels and can_gate(w, activation):
        _check_fits(x, w)
        return gated_matmul_panels(_inputs(x, w), w, activation)
    halves = matmul(x, w, interpret=interpret)
    return gated_activation(halves, activation, backend="cpu" if panels else "reference")


def _check_fits(x: jax.Array, w: QuantizedArray | StackedRows) -> None:
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"activations {x.shape} do not fit a matrix {w.shape} on their last axis")


def _inputs(x: jax.Array, w: QuantizedArray) -> jax.Array:
    """x as float32, in the order in which w keeps its inputs."""
    x = x.astype(jnp.float32)
    perm = w.parts.get("perm")
    return x if perm is None else jnp.take(x, perm, axis=-1, mode="clip")


def take_rows(w: QuantizedArray | StackedRows, rows: jax.Array) -> jax.Array:
    """Rows [T] int32 of packed w [N, K], expanded: float32 [T, K]. Ids are clipped to 0..N-1."""
    if isinstance(w, StackedRows):
        return _take_stacked(w, rows)
    if w.layout == "panels":
        return in_input_order(w, take_rows_panels(w, rows))
    if w.layout in GPU_LAYOUTS:
        from pallas_kernels.quantized_matmul.mosaic_gpu import take_rows_gpu

        return in_input_order(w, take_rows_gpu(w, rows))
    return take_rows_reference(w, rows)


def _take_stacked(w: StackedRows, rows: jax.Array) -> jax.Array:
    """Every piece is asked for all rows, its own being kept: such a table is rare."""
    rows = jnp.clip(rows, 0, w.shape[0] - 1)
    taken = jnp.zeros((rows.shape[0], w.shape[1]), jnp.float32)
    start = 0
    for piece in w.pieces:
        inside = (rows >= start) & (rows < start + piece.shape[0])
        taken = jnp.where(inside[:, None], take_rows(piece, rows - start), taken)
        start += piece.shape[0]
    return taken


def repack(w: QuantizedArray, layout: str) -> QuantizedArray:
    """The same matrix in the layout of another backend, losing nothing.

    Raises ValueError for an array that is not in the layout "rows" (see `check_array` for what is
    checked about it) or that the layout cannot keep, NotImplementedError for an unknown layout.
    """
    check_array(w)
    if w.layout != "rows":
        raise ValueError(f"only the layout 'rows' can be repacked, got {w.layout!r}")
    if layout == "rows":
        return w
    if layout == "panels":
        return pack_panels(w)
    if layout in GPU_LAYOUTS:
        return pack_gpu(w, layout)
    raise NotImplementedError(_unknown(layout))


def repack_shape(w: QuantizedArray, layout: str) -> QuantizedArray:
    """What `repack` gives for a w whose parts are shapes (perm may be an array). Raises alike."""
    check_array(w)
    if w.layout != "rows":
        raise ValueError(f"only the layout 'rows' can be repacked, got {w.layout!r}")
    if layout == "rows":
        return w
    if layout in GPU_LAYOUTS:
        return _gpu_shapes(w, layout)
    if layout != "panels":
        raise NotImplementedError(_unknown(layout))
    panels = jax.ShapeDtypeStruct(panels_shape(w.format, *w.shape, w.group), jnp.uint8)
    parts = {"panels": panels} | {k: v for k, v in w.parts.items() if k == "perm"}
    return QuantizedArray(parts, w.format_name, w.shape, w.group, "panels")


def _unknown(layout: str) -> str:
    return f"there is no layout {layout!r}; choose {', '.join(_LAYOUTS)}"


def _gpu_shapes(w: QuantizedArray, layout: str) -> QuantizedArray:
    parts = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for name, (dtype, shape) in part_shapes(w).items()
    }
    parts |= {k: v for k, v in w.parts.items() if k == "perm"}
    return QuantizedArray(parts, w.format_name, w.shape, w.group, gpu_layout(w, layout))
