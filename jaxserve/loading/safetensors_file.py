"""Weights of a Hugging Face folder: one or several safetensors files.

The safetensors library checks every header (lengths, offsets, coverage of the file) before it
hands out anything. Files of pickled objects (.bin, .pt, .pth) can run code and are never opened.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches numpy the name bfloat16, which safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_empty
from jaxserve.loading.json_file import read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_FILES = 4096
_MAX_INDEX_BYTES = 1 << 26
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PIECE_ELEMENTS = 1 << 22  # read at a time, so that no second copy of a tensor is whole in memory


class SafetensorsFolder:
    """A TensorSource over a folder. Opening reads headers only. Names are taken as they are."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        index = _read_index(folder)
        self._file_of: dict[str, Path] = {}
        self._slices: dict[str, Any] = {}
        for path in _weight_files(folder, index):
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                if name in self._file_of:
                    raise ModelLoadError(
                        f"{path}: tensor {_shown(name)} is also in {self._file_of[name].name}"
                    )
                self._file_of[name] = path
                self._slices[name] = handle.get_slice(name)
        _check_index(folder, index, self._file_of)

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def load(self, name: str) -> np.ndarray:
        tensor = self._slices[name]
        if tensor.get_dtype() not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"{self._file_of[name]}: tensor {_shown(name)} has the type {tensor.get_dtype()}; "
                f"weights can be {', '.join(_FLOAT_TYPES)}. Take an unquantised checkpoint, or GGUF"
            )
        shape = self.shape(name)
        values = aligned_empty(shape, np.float32)
        if not shape:
            values[...] = tensor[...]
            return values
        rows = max(1, _PIECE_ELEMENTS // max(1, values[:1].size))
        for start in range(0, shape[0], rows):
            end = min(start + rows, shape[0])  # the library refuses slices past the end
            values[start:end] = tensor[start:end]
        return values

    def label(self, name: str) -> str:
        return name


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
                f"{path}: tensor {_shown(name)} is in {_shown(str(file_name))}; "
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
            f"{folder}: the weights are in {_shown(pickled[0])}, a pickle, which can run any code "
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
                f"{folder / file_name}: tensor {_shown(name)} is not in it, though {INDEX_NAME} "
                "says so; download the model again"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: there is no such file; download the model again") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: damaged safetensors file: {str(error)[:300]}; download it again"
        ) from error


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")
