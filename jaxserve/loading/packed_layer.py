"""One linear layer of a quantised checkpoint: its tensors, read with every number checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.safetensors_file import SafetensorsFolder, shown
from pallas_kernels.quantized_matmul.array import QuantizedArray

_SCALE_TYPES = ("F64", "F32", "F16", "BF16")
_LARGEST_SCALE = 2.0**100


@dataclass(frozen=True)
class PackedLayer:
    """The tensors `name`.qweight, `name`.scales and so on of a folder; a part is the last word."""

    folder: SafetensorsFolder
    name: str

    def has(self, part: str) -> bool:
        return self.folder.has(f"{self.name}.{part}")

    def shape(self, part: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a part that must exist, have that many dimensions, and not be empty."""
        if not self.has(part):
            raise self.refusal(f"{part} is missing")
        shape = self.folder.shape(f"{self.name}.{part}")
        if len(shape) != dimensions or 0 in shape:
            raise self.refusal(f"{part} has the shape {list(shape)}, want {dimensions} dimensions")
        return shape

    def dtype(self, part: str) -> str:
        return self.folder.dtype(f"{self.name}.{part}")

    def raw(self, part: str, *dtypes: str) -> np.ndarray:
        """The numbers of a part of one of these types (safetensors' names)."""
        if not self.has(part):
            raise self.refusal(f"{part} is missing")
        if self.dtype(part) not in dtypes:
            raise self.refusal(
                f"{part} has the type {self.dtype(part)[:40]}, want {' or '.join(dtypes)}"
            )
        return self.folder.raw(f"{self.name}.{part}")

    def scales(self, part: str) -> np.ndarray:
        """A part of scales as float32: finite, and so are their products with any code."""
        if self.has(part) and self.dtype(part) == "F8_E8M0":
            # 2 ** (byte - 127); the byte 255 means NaN and comes out too large.
            values = np.ldexp(1.0, self.raw(part, "F8_E8M0").astype(np.int32) - 127)
        else:
            values = self.raw(part, *_SCALE_TYPES).astype(np.float64)
        if not (np.abs(values) < _LARGEST_SCALE).all():  # false for NaN, too
            raise self.refusal(
                f"{part} holds infinity, NaN or a number too large; the file is damaged"
            )
        return values.astype(np.float32)

    def want_shape(self, part: str, wanted: tuple[int, ...]) -> None:
        """Refuse the layer unless the part has this shape."""
        got = self.shape(part, len(wanted))
        if got != wanted:
            raise self.refusal(f"{part} has the shape {list(got)}, want {list(wanted)}")

    def refusal(self, problem: str) -> ModelLoadError:
        """The error that says what is wrong with this layer, to be raised."""
        return ModelLoadError(f"{self.folder.location}: layer {shown(self.name)}: {problem}")


class LayerFormat(Protocol):
    """How one way of quantising keeps a layer.

    title: for logs and errors. markers: parts by which a packed layer may be known. parts: all of
    a packed layer's parts, which together stand for its weight. ignored: parts that stand for
    nothing we use, wherever they are. is_packed() is asked where a marker is. shape() reads
    headers only, packed_shape() also which group each input belongs to; it is what read() gives,
    as shapes. They raise ModelLoadError.
    """

    @property
    def title(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def is_packed(self, layer: PackedLayer) -> bool: ...

    def shape(self, layer: PackedLayer) -> tuple[int, int]: ...

    def packed_shape(self, layer: PackedLayer) -> QuantizedArray: ...

    def read(self, layer: PackedLayer) -> QuantizedArray: ...


def setting(settings: Mapping[str, Any], key: str, default: Any, choices: tuple[Any, ...]) -> Any:
    """A value of the quantization's settings; ModelLoadError if it is none of `choices`."""
    value = settings.get(key, default)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        wanted = ", ".join(repr(choice) for choice in choices)
        raise ModelLoadError(f"quantization: {key} is {str(value)[:40]!r}; supported: {wanted}")
    return value
