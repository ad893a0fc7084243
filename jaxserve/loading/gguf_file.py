"""A GGUF checkpoint of one or several files: metadata, packed bytes, and float32 tensors.

Only a header is mapped into memory, while it is read. Tensors are read into buffers of their own:
pages of a mapped file would count as memory of this process for as long as it serves, next to
the weights made from them, and a file cut short under a mapping ends the process.
"""

import logging
import mmap
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_copy, aligned_empty
from jaxserve.loading.gguf_header import GGUFHeader, TensorInfo, read_header
from jaxserve.loading.tensor_source import dense_shape
from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.formats import FORMATS

logger = logging.getLogger(__name__)

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 4096

# Dequantised at a time: the temporaries of a piece stay in a CPU's cache (2 to 4 times as fast as
# one call for a tensor), and no second copy of a tensor is ever whole in memory.
_BLOCKS_PER_PIECE = 4096

_PLAIN_TYPES = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}

# Types whose matrices stay as they are: the format they are, and numpy's type for plain numbers.
_DENSE_TYPES: dict[GGMLQuantizationType, tuple[str, Any]] = {
    GGMLQuantizationType.F32: ("f32", np.float32),
    GGMLQuantizationType.F16: ("f16", np.float16),
    GGMLQuantizationType.BF16: ("bf16", ml_dtypes.bfloat16),
}
_BLOCK_TYPES = {
    GGMLQuantizationType[form.name.upper()]: form.name
    for form in FORMATS.values()
    if form.kind == "blocks"
}


class _Descriptor:
    """A file that stays open until the last of the objects that read tensors from it is gone."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True)
class _Shard:
    path: Path
    file: _Descriptor
    header: GGUFHeader


class GGUFFile:
    """An opened GGUF checkpoint. Opening reads headers only; tensors are read when asked for.

    path may be any file of a sharded checkpoint (`-00001-of-00003.gguf` ...); the others are
    found beside it. Raises ModelLoadError, naming file and tensor, on anything damaged or missing.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        shards = _open_shards(self.path)
        self.metadata: dict[str, Any] = shards[0].header.metadata
        self._told_types: set[GGMLQuantizationType] = set()
        self._tensors: dict[str, tuple[_Shard, TensorInfo]] = {}
        for shard in shards:
            for name, info in shard.header.tensors.items():
                if name in self._tensors:
                    raise ModelLoadError(
                        f"{shard.path}: tensor {name!r} is also in {self._tensors[name][0].path}"
                    )
                self._tensors[name] = (shard, info)
        expected = self.metadata.get("split.tensors.count", len(self._tensors))
        if expected != len(self._tensors):
            raise ModelLoadError(
                f"{self.path}: split.tensors.count is {expected}, but the {len(shards)} files "
                f"hold {len(self._tensors)} tensors; they are not parts of one checkpoint"
            )

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in numpy order: [output rows, input columns] for a matrix."""
        return self._find(name)[1].shape

    def type(self, name: str) -> GGMLQuantizationType:
        """How the tensor is packed."""
        return self._find(name)[1].type

    def raw(self, name: str) -> np.ndarray:
        """The packed bytes [num_bytes] uint8, read into a new array (see aligned_array)."""
        shard, info = self._find(name)
        packed = aligned_empty((info.num_bytes,), np.uint8)
        unread, start = memoryview(packed), info.start
        try:
            while unread:
                count = os.preadv(shard.file.number, [unread], start)
                if count == 0:
                    raise OSError(f"it ends at byte {start}; it was whole when it was opened")
                unread, start = unread[count:], start + count
        except OSError as error:
            raise ModelLoadError(
                f"{shard.path}: tensor {name!r} cannot be read: {error}"
            ) from error
        return packed

    def load(self, name: str) -> np.ndarray:
        """The tensor as a new float32 array of shape(name), dequantised."""
        shard, info = self._find(name)
        packed = self.raw(name)
        if info.type == GGMLQuantizationType.F32:
            return packed.view(np.float32).reshape(info.shape)
        if info.type in _PLAIN_TYPES:
            values = packed.view(_PLAIN_TYPES[info.type]).reshape(info.shape)
            return aligned_copy(values, np.float32)
        try:
            return _dequantize(packed, info.type).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{shard.path}: tensor {name!r} has the type {info.type.name}, which the gguf "
                "package cannot dequantise; take another quantisation of this model"
            ) from error

    def load_packed(self, name: str) -> QuantizedArray:
        """The matrix in the layout "rows", as the file has it; parts are new numpy arrays.

        A type that is none of the formats is expanded to float32, and the log says so. Raises
        ModelLoadError as `load` does, and for a tensor that is no matrix.
        """
        shard, info = self._find_matrix(name)
        rows, inputs = info.shape
        if info.type in _BLOCK_TYPES:
            blocks = self.raw(name).reshape(rows, -1)
            return QuantizedArray({"blocks": blocks}, _BLOCK_TYPES[info.type], (rows, inputs))
        if info.type in _DENSE_TYPES:
            form, dtype = _DENSE_TYPES[info.type]
            values = self.raw(name).view(dtype).reshape(info.shape)
            return QuantizedArray({"values": values}, form, (rows, inputs))
        if info.type not in self._told_types:
            self._told_types.add(info.type)
            logger.warning(
                "%s: there are no packed products for the type %s; its tensors (%s ...) are "
                "expanded to float32 in memory",
                shard.path, info.type.name, name,
            )  # fmt: skip
        return QuantizedArray({"values": self.load(name)}, "f32", (rows, inputs))

    def packed_shape(self, name: str) -> QuantizedArray:
        """What load_packed gives, as shapes."""
        _, info = self._find_matrix(name)
        rows, inputs = info.shape
        if info.type not in _BLOCK_TYPES:
            return dense_shape(_DENSE_TYPES.get(info.type, ("f32", None))[0], info.shape)
        form = FORMATS[_BLOCK_TYPES[info.type]]
        row_bytes = inputs // form.block_size * form.block_bytes
        blocks = jax.ShapeDtypeStruct((rows, row_bytes), np.uint8)
        return QuantizedArray({"blocks": blocks}, form.name, (rows, inputs))

    def _find_matrix(self, name: str) -> tuple[_Shard, TensorInfo]:
        shard, info = self._find(name)
        if len(info.shape) != 2:
            raise ModelLoadError(
                f"{shard.path}: tensor {name!r} has the shape {list(info.shape)}, want a matrix"
            )
        return shard, info

    def _find(self, name: str) -> tuple[_Shard, TensorInfo]:
        found = self._tensors.get(name)
        if found is None:
            raise ModelLoadError(f"{self.path}: there is no tensor {name!r}")
        return found


def _dequantize(packed: np.ndarray, tensor_type: GGMLQuantizationType) -> np.ndarray:
    """Packed blocks [num_bytes] uint8 -> float32 [num_elements]."""
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor_type]
    out = aligned_empty((packed.size // block_bytes * block_elements,), np.float32)
    pieces = range(0, packed.size // block_bytes, _BLOCKS_PER_PIECE)
    # float16 scales may hold anything, also values whose product overflows to infinity.
    with np.errstate(all="ignore"):
        for first in pieces:
            end = first + _BLOCKS_PER_PIECE
            piece = packed[first * block_bytes : end * block_bytes].reshape(1, -1)
            out[first * block_elements : end * block_elements] = dequantize(piece, tensor_type)[0]
    return out


def _open_shards(path: Path) -> list[_Shard]:
    """All files of the checkpoint that `path` belongs to, ordered by split.no."""
    first = _open_shard(path)
    count = first.header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise ModelLoadError(f"{path}: split.count is {str(count)[:40]}, not 0 to {MAX_SHARDS}")
    if count <= 1:
        return [first]
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelLoadError(
            f"{path}: this is one of {count} files of a checkpoint; name them "
            f"NAME-00001-of-{count:05d}.gguf and so on, in one folder"
        )
    shards = {}
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"
        shard = first if name == path.name else _open_shard(path.with_name(name))
        index = shard.header.metadata.get("split.no")
        if type(index) is not int or not 0 <= index < count or index in shards:
            raise ModelLoadError(
                f"{shard.path}: split.no is {str(index)[:40]}; each file of a checkpoint of "
                f"{count} files needs its own number from 0 to {count - 1}"
            )
        shards[index] = shard
    return [shards[index] for index in range(count)]


def _open_shard(path: Path) -> _Shard:
    try:
        file = _Descriptor(path)
        header = memoryview(mmap.mmap(file.number, 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        match = _SHARD_NAME.fullmatch(path.name)
        part = f" (part {int(match['number'])} of {int(match['count'])})" if match else ""
        raise ModelLoadError(f"{path}: there is no such file{part}; download it") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    return _Shard(path, file, read_header(header, str(path)))
