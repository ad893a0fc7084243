"""Weights of a Hugging Face folder: one or several safetensors files.

The safetensors library checks every header (lengths, offsets, coverage of the file) before
anything is read. The bytes are read here, because its numpy side has no 8-bit floats, and not
mapped, so that the file does not count as memory. Files of pickled objects (.bin, .pt, .pth) can
run code and are never opened.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_empty
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.tensor_source import dense_shape
from pallas_kernels.quantized_matmul.array import QuantizedArray

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_FILES = 4096
_MAX_INDEX_BYTES = 1 << 26
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PACKED_AS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_PIECE_ELEMENTS = 1 << 22  # read at a time, so that a tensor is whole in memory only once

# 8-bit floats are handed out as the bits they are.
NUMPY_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is: bytes start to end of the file. dtype: safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """Bytes start to end of the tensor, uint8, aligned."""
        end = self.end - self.start if end is None else end
        buffer = aligned_empty((end - start,), np.uint8)
        with self.path.open("rb") as file:
            file.seek(self.start + start)
            got = file.readinto(buffer)
        if got != end - start:
            raise ModelLoadError(f"{self.path}: the file has become shorter; download it again")
        return buffer


class SafetensorsFolder:
    """A TensorSource over a folder. Opening reads headers only. Names are taken as they are."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        index = _read_index(folder)
        self._tensors: dict[str, _Stored] = {}
        for path in _weight_files(folder, index):
            for name, stored in _open(path).items():
                if name in self._tensors:
                    raise ModelLoadError(
                        f"{path}: tensor {shown(name)} is also in {self._tensors[name].path.name}"
                    )
                self._tensors[name] = stored
        _check_index(folder, index, {name: at.path for name, at in self._tensors.items()})

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """The type as safetensors calls it: F32, BF16, F8_E4M3, I32 ..."""
        return self._tensors[name].dtype

    def file(self, name: str) -> Path:
        """The file a tensor is in, for error texts."""
        return self._tensors[name].path

    def raw(self, name: str) -> np.ndarray:
        """The tensor as the file has it (see NUMPY_TYPES), in memory of the caller.

        Raises ModelLoadError for a type that numpy has no numbers for.
        """
        at = self._tensors[name]
        if at.dtype not in NUMPY_TYPES:
            raise ModelLoadError(f"{at.path}: tensor {shown(name)} has the type {at.dtype[:40]}")
        return at.read().view(NUMPY_TYPES[at.dtype]).reshape(at.shape)

    def load(self, name: str) -> np.ndarray:
        self._check_float(name)
        at = self._tensors[name]
        dtype = np.dtype(NUMPY_TYPES[at.dtype])
        values = aligned_empty(at.shape, np.float32)
        flat = values.reshape(-1)
        for start in range(0, flat.size, _PIECE_ELEMENTS):
            piece = flat[start : start + _PIECE_ELEMENTS]
            first = start * dtype.itemsize
            piece[...] = at.read(first, first + piece.size * dtype.itemsize).view(dtype)
        return values

    def load_packed(self, name: str) -> QuantizedArray:
        """A matrix in the type of the file; float64 becomes float32."""
        self._check_matrix(name)
        form = _PACKED_AS.get(self.dtype(name))
        values = self.load(name) if form is None else self.raw(name)
        return QuantizedArray({"values": values}, form or "f32", values.shape)

    def packed_shape(self, name: str) -> QuantizedArray:
        self._check_matrix(name)
        return dense_shape(_PACKED_AS.get(self.dtype(name), "f32"), self.shape(name))

    def label(self, name: str) -> str:
        return name

    def _check_matrix(self, name: str) -> None:
        self._check_float(name)
        shape = self.shape(name)
        if len(shape) != 2:
            raise ModelLoadError(
                f"{self.file(name)}: tensor {shown(name)} {list(shape)} is no matrix"
            )

    def _check_float(self, name: str) -> None:
        if self.dtype(name) not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"{self.file(name)}: tensor {shown(name)} has the type {self.dtype(name)[:40]}, "
                f"and config.json names no quantization it belongs to; weights can be "
                f"{', '.join(_FLOAT_TYPES)}. Take an unquantised checkpoint, or GGUF"
            )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a folder with an index; None without one."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_json_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is missing or empty")
    for name, file_name in weight_map.items():
        plain = isinstance(file_name, str) and Path(file_name).name == file_name
        if not plain or not file_name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: tensor {shown(name)} is in {shown(str(file_name))}; "
                "want the name of a .safetensors file of the same folder"
            )
    return weight_map


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    """The files to read: those of the index, model.safetensors alone, or all there are."""
    if index is not None:
        paths = [folder / name for name in sorted(set(index.values()))]
    elif (folder / SINGLE_NAME).exists():
        paths = [folder / SINGLE_NAME]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(_no_weights(folder))
    if len(paths) > MAX_FILES:
        raise ModelLoadError(f"{folder}: {len(paths)} weight files, the limit is {MAX_FILES}")
    return paths


def _no_weights(folder: Path) -> str:
    pickled = [path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}")]
    if pickled:
        return (
            f"{folder}: the weights are in {shown(pickled[0])}, a pickle, which can run any code "
            "and is not opened. Load the model with transformers where you trust it, and call "
            "save_pretrained(folder): that writes safetensors"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"{folder}: no .safetensors file, but GGUF; name the file: {folder / ggufs[0]}"
    return f"{folder}: no .safetensors file in this folder; download the model again"


def _check_index(folder: Path, index: dict[str, str] | None, file_of: dict[str, Path]) -> None:
    for name, file_name in (index or {}).items():
        found = file_of.get(name)
        if found is None or found.name != file_name:
            raise ModelLoadError(
                f"{folder / file_name}: tensor {shown(name)} is not in it, though {INDEX_NAME} "
                "says so; download the model again"
            )


def _open(path: Path) -> dict[str, _Stored]:
    """The tensors of a file whose header the library has checked."""
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        offset = 8 + header_bytes
        return {
            name: _Stored(
                path, at["dtype"], tuple(at["shape"]), *(offset + end for end in at["data_offsets"])
            )
            for name, at in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: there is no such file; download the model again") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: damaged safetensors file: {str(error)[:300]}; download it again"
        ) from error


def shown(name: str) -> str:
    """A name out of a file, for error texts: quoted and not too long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
