"""One packed parameter from the tensors it is joined from, in the layout of a backend."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_copy, aligned_empty
from jaxserve.loading.tensor_source import TensorSource, dense_shape
from pallas_kernels.quantized_matmul import (
    QuantizedArray,
    StackedRows,
    check_array,
    repack,
    repack_shape,
)

_DENSE_FORMATS = {np.dtype(np.float16): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}


def stays_packed(source: TensorSource, names: Sequence[str], layout: str) -> bool:
    """Whether a parameter of these tensors is kept packed in that layout, by their headers.

    On a GPU, XLA's own products are the best there are of matrices that nobody packed: those stay
    plain arrays. CPU kernels want them rearranged, too.
    """
    if layout != "gpu":
        return True
    return any(source.packed_shape(name).format.kind != "dense" for name in names)


def load_packed_param(
    source: TensorSource, names: Sequence[str], dtype: np.dtype, layout: str
) -> QuantizedArray | StackedRows:
    """The matrix whose rows are those of the named tensors, one after the other, in `layout`.

    Neighbours kept alike become one array; where formats differ the matrix is StackedRows.
    Numbers that are float32 in the file are rounded to `dtype`, as in a plain parameter; 16-bit
    ones stay what they are, which loses nothing. Raises ModelLoadError naming the tensors.
    """
    try:
        joined = _joined([_checked(source, name, dtype) for name in names])
        # Popped, so that no more than one piece is in memory in both layouts.
        packed = [repack(joined.pop(0), layout) for _ in range(len(joined))]
    except ValueError as error:
        raise _naming(source, names, error) from error
    return packed[0] if len(packed) == 1 else StackedRows(tuple(packed))


def packed_param_shape(
    source: TensorSource, names: Sequence[str], dtype: np.dtype, layout: str
) -> QuantizedArray | StackedRows:
    """What load_packed_param gives, with shapes for arrays, from headers. Raises as it does."""
    try:
        runs = _runs([_rounded_shape(source.packed_shape(name), dtype) for name in names])
        packed = [repack_shape(_join_shapes(run), layout) for run in runs]
    except ValueError as error:
        raise _naming(source, names, error) from error
    return packed[0] if len(packed) == 1 else StackedRows(tuple(packed))


def _naming(source: TensorSource, names: Sequence[str], error: ValueError) -> ModelLoadError:
    labels = ", ".join(source.label(name) for name in names)
    return ModelLoadError(f"{source.location}: {labels[:400]}: {error}")


def _rounded_shape(piece: QuantizedArray, dtype: np.dtype) -> QuantizedArray:
    if piece.format_name != "f32" or dtype == np.float32:
        return piece
    return dense_shape(_DENSE_FORMATS[dtype], piece.shape)


def _join_shapes(run: Sequence[QuantizedArray]) -> QuantizedArray:
    rows = sum(piece.shape[0] for piece in run)
    parts = {
        name: part if name == "perm" else jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype)
        for name, part in run[0].parts.items()
    }
    return replace(run[0], parts=parts, shape=(rows, run[0].shape[1]))


def _checked(source: TensorSource, name: str, dtype: np.dtype) -> QuantizedArray:
    piece = source.load_packed(name)
    check_array(piece)
    if piece.format_name != "f32" or dtype == np.float32:
        return piece
    values = aligned_copy(np.asarray(piece.parts["values"]), dtype)
    return replace(piece, parts={"values": values}, format_name=_DENSE_FORMATS[dtype])


def _joined(pieces: Sequence[QuantizedArray]) -> list[QuantizedArray]:
    """Runs of neighbours that are kept alike, each as one array."""
    return [run[0] if len(run) == 1 else _join(run) for run in _runs(pieces)]


def _runs(pieces: Sequence[QuantizedArray]) -> list[list[QuantizedArray]]:
    runs: list[list[QuantizedArray]] = []
    for piece in pieces:
        if runs and _alike(runs[-1][0], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _alike(one: QuantizedArray, other: QuantizedArray) -> bool:
    same = (one.format_name, one.group, set(one.parts)) == (
        other.format_name, other.group, set(other.parts),
    )  # fmt: skip
    return same and np.array_equal(one.parts.get("perm", ()), other.parts.get("perm", ()))


def _join(run: Sequence[QuantizedArray]) -> QuantizedArray:
    rows = sum(piece.shape[0] for piece in run)
    parts = dict(run[0].parts)
    for name, part in parts.items():
        if name != "perm":  # of columns: the same for all rows
            out = aligned_empty((rows, *part.shape[1:]), part.dtype)
            parts[name] = np.concatenate([piece.parts[name] for piece in run], out=out)
    return replace(run[0], parts=parts, shape=(rows, run[0].shape[1]))
