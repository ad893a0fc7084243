"""Where weights come from, whatever the file format: tensors by their Hugging Face names."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from jaxserve.loading.aligned_array import aligned_copy
from pallas_kernels.quantized_matmul.array import QuantizedArray

DENSE_TYPES: Mapping[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}


class TensorSource(Protocol):
    """Named tensors in Hugging Face's layout: matrices are [output rows, input columns].

    location: file or folder, for error texts. load() gives a float32 array that the caller owns,
    aligned as in aligned_array; it raises ModelLoadError naming file and tensor, and may be called
    from several threads.
    load_packed() gives a matrix as the file keeps it: a QuantizedArray in the layout "rows" whose
    parts are numpy arrays that the caller owns; dense formats for plain numbers. shape() is the
    shape of the matrix it stands for. It raises as load() does.
    packed_shape() is what load_packed() would give, from the file's header, with a jax
    ShapeDtypeStruct for every part (perm, which is small, is read); it raises ModelLoadError, too.
    label() is what the file itself calls a tensor, present or not.
    """

    location: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> np.ndarray: ...

    def load_packed(self, name: str) -> QuantizedArray: ...

    def packed_shape(self, name: str) -> QuantizedArray: ...

    def label(self, name: str) -> str: ...


def dense_shape(format_name: str, shape: tuple[int, ...]) -> QuantizedArray:
    """A matrix of plain numbers, as shapes."""
    rows, inputs = shape
    values = jax.ShapeDtypeStruct((rows, inputs), DENSE_TYPES[format_name])
    return QuantizedArray({"values": values}, format_name, (rows, inputs))


class ArraySource:
    """Tensors that are in memory already: random weights, tests, weights a program computed."""

    def __init__(self, tensors: Mapping[str, np.ndarray], location: str = "arrays") -> None:
        self.location = location
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, name: str) -> np.ndarray:
        return aligned_copy(self._tensors[name], np.float32)

    def load_packed(self, name: str) -> QuantizedArray:
        values = self.load(name)
        return QuantizedArray({"values": values}, "f32", values.shape)

    def packed_shape(self, name: str) -> QuantizedArray:
        return dense_shape("f32", self.shape(name))

    def label(self, name: str) -> str:
        return name
