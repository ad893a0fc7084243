"""Folders of safetensors: every float type, several files, damage that names file and tensor."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError
from jaxserve.loading import safetensors_file
from jaxserve.loading.aligned_array import ALIGNMENT
from jaxserve.loading.safetensors_file import SafetensorsFolder


def raw_safetensors(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def described(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        SafetensorsFolder(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 800
    return str(caught.value)


def write_index(folder: Path, weight_map: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_float_types_become_float32(
    dtype: Any, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read whole or in pieces of a row, since large tensors are."""
    monkeypatch.setattr(safetensors_file, "_PIECE_ELEMENTS", piece)
    rng = np.random.default_rng(0)
    tensors = {
        "matrix": rng.normal(size=(5, 3)).astype(dtype),
        "vector": rng.normal(size=9).astype(dtype),
        "number": np.array(2.5, dtype),
        "none": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    assert set(source.names()) == set(tensors)
    for name, values in tensors.items():
        loaded = source.load(name)
        assert source.shape(name) == loaded.shape == values.shape
        assert loaded.dtype == np.float32
        np.testing.assert_array_equal(loaded, values.astype(np.float32))
    assert source.load("matrix").ctypes.data % ALIGNMENT == 0
    assert source.label("matrix") == "matrix"


def test_files_of_an_index(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"c": np.zeros(3, np.float32)}, tmp_path / "consolidated.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(tmp_path, names)
    source = SafetensorsFolder(tmp_path)
    assert set(source.names()) == {"a", "b"}
    np.testing.assert_array_equal(source.load("a"), [1, 1])
    (tmp_path / names["b"]).unlink()
    assert f"{names['b']}: there is no such file" in refusal(tmp_path)


def test_without_an_index_the_usual_name_wins_over_all_files(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "y.safetensors")
    assert set(SafetensorsFolder(tmp_path).names()) == {"a", "b"}
    save_file({"c": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert set(SafetensorsFolder(tmp_path).names()) == {"c"}


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"same": np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    assert "y.safetensors: tensor 'same' is also in x.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("target", ["../other.safetensors", "/etc/passwd", "x.bin", 7, ""])
def test_an_index_cannot_point_elsewhere(target: Any, tmp_path: Path) -> None:
    write_index(tmp_path, {"a": target})
    assert "tensor 'a' is in" in refusal(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    assert "x.safetensors: tensor 'b' is not in it" in refusal(tmp_path)
    write_index(tmp_path, {})
    assert "weight_map is missing or empty" in refusal(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = refusal(tmp_path)
    assert "'pytorch_model.bin', a pickle" in text
    assert "save_pretrained" in text


def test_folders_without_weights(tmp_path: Path) -> None:
    assert "no .safetensors file" in refusal(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"name the file: {tmp_path / 'm.gguf'}" in refusal(tmp_path)


GOOD = {"w": described("F32", [2], 0, 8)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        raw_safetensors(GOOD)[:-3],
        raw_safetensors(GOOD, bytes(7)),
        raw_safetensors(GOOD, bytes(9)),
        raw_safetensors(b"not json", bytes(8)),
        raw_safetensors(b"[" * 100_000, bytes(8)),
        raw_safetensors([1, 2], bytes(8)),
        raw_safetensors({"w": described("F32", [3], 0, 8)}, bytes(8)),
        raw_safetensors({"w": described("F32", [2**62, 4, 2], 0, 8)}, bytes(8)),
        raw_safetensors({"w": described("F32", [2], 8, 0)}, bytes(8)),
        raw_safetensors({"w": described("F32", [2], 0, 2**64 - 1)}, bytes(8)),
        raw_safetensors({"w": described("F99", [2], 0, 8)}, bytes(8)),
        raw_safetensors({"w": described("F32", [-2], 0, 8)}, bytes(8)),
        raw_safetensors(
            {"v": described("F32", [2], 0, 8), "w": described("F32", [2], 4, 12)}, bytes(12)
        ),
    ],
)
def test_damaged_headers(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert f"{path}: damaged safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", ["I32", "U8", "F8_E4M3", "BOOL"])
def test_packed_weights_name_tensor_and_type(dtype: str, tmp_path: Path) -> None:
    size = 8 if dtype == "I32" else 2
    header = {"layer.qweight": described(dtype, [2], 0, size)}
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, bytes(size)))
    source = SafetensorsFolder(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"tensor 'layer\.qweight' has the type {dtype}"):
        source.load("layer.qweight")
