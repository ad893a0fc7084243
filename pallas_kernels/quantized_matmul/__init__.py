"""Products with weight matrices that stay packed, and rows taken out of them."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.array import QuantizedArray, StackedRows
from pallas_kernels.quantized_matmul.checks import check_array
from pallas_kernels.quantized_matmul.cpu import (
    matmul_panels,
    pack_panels,
    panels_shape,
    take_rows_panels,
)
from pallas_kernels.quantized_matmul.formats import FORMATS, Format
from pallas_kernels.quantized_matmul.reference import (
    dequantize,
    in_input_order,
    matmul_reference,
    take_rows_reference,
)

__all__ = [
    "FORMATS",
    "Format",
    "QuantizedArray",
    "StackedRows",
    "check_array",
    "dequantize",
    "matmul",
    "repack",
    "repack_shape",
    "take_rows",
]


def matmul(x: jax.Array, w: QuantizedArray | StackedRows) -> jax.Array:
    """x [..., K] times packed w [N, K]: float32 [..., N].

    Activations stay float32 (bfloat16 ones are widened), and every weight is expanded to the
    float32 number it stands for before it is multiplied. The array's layout says which backend
    runs: "rows" the reference, "panels" the native CPU kernels.

    Raises ValueError for shapes that do not fit and NotImplementedError for an unknown layout.
    """
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"activations {x.shape} do not fit a matrix {w.shape} on their last axis")
    if isinstance(w, StackedRows):
        return jnp.concatenate([matmul(x, piece) for piece in w.pieces], axis=-1)
    x = x.astype(jnp.float32)
    perm = w.parts.get("perm")
    if perm is not None:
        x = jnp.take(x, perm, axis=-1, mode="clip")
    if w.layout == "rows":
        return matmul_reference(x, w)
    if w.layout == "panels":
        return matmul_panels(x, w)
    raise NotImplementedError(f"quantized_matmul has no layout {w.layout!r}; it has: rows, panels")


def take_rows(w: QuantizedArray | StackedRows, rows: jax.Array) -> jax.Array:
    """Rows [T] int32 of packed w [N, K], expanded: float32 [T, K]. Ids are clipped to 0..N-1."""
    if isinstance(w, StackedRows):
        return _take_stacked(w, rows)
    if w.layout == "panels":
        return in_input_order(w, take_rows_panels(w, rows))
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
    checked about it), NotImplementedError for an unknown layout.
    """
    check_array(w)
    if w.layout != "rows":
        raise ValueError(f"only the layout 'rows' can be repacked, got {w.layout!r}")
    if layout == "rows":
        return w
    if layout == "panels":
        return pack_panels(w)
    raise NotImplementedError(f"there is no layout {layout!r}; choose rows or panels")


def repack_shape(w: QuantizedArray, layout: str) -> QuantizedArray:
    """What `repack` gives for a w whose parts are shapes (perm may be an array). Raises alike."""
    check_array(w)
    if w.layout != "rows":
        raise ValueError(f"only the layout 'rows' can be repacked, got {w.layout!r}")
    if layout == "rows":
        return w
    if layout != "panels":
        raise NotImplementedError(f"there is no layout {layout!r}; choose rows or panels")
    panels = jax.ShapeDtypeStruct(panels_shape(w.format, *w.shape, w.group), jnp.uint8)
    parts = {"panels": panels} | {k: v for k, v in w.parts.items() if k == "perm"}
    return QuantizedArray(parts, w.format_name, w.shape, w.group, "panels")
