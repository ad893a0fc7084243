"""Whole GGUF files: what is read equals what was written, and what the gguf package reads."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import ALIGNMENT
from jaxserve.loading.gguf_file import _BLOCKS_PER_PIECE, GGUFFile
from tests.support.gguf_files import Q, raw_gguf, raw_tensor, write_gguf

# Types that the gguf package can make, with the largest error that the type allows a value of a
# block, as a part of the block's largest magnitude (half a step, and float16's rounding of it).
ROUND_TRIPS = {
    Q.F32: 0.0,
    Q.F16: 2**-11,
    Q.BF16: 2**-8,
    Q.Q8_0: 0.5 / 127 + 2**-11,
    Q.Q5_1: 1 / 31 + 2**-10,
    Q.Q5_0: 1 / 16 + 2**-10,
    Q.Q4_1: 1 / 15 + 2**-10,
    Q.Q4_0: 1 / 8 + 2**-10,
}
K_TYPES = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)
I_TYPES = (Q.IQ1_S, Q.IQ2_XS, Q.IQ3_S, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4, Q.TQ1_0, Q.TQ2_0)


@pytest.mark.parametrize("kind", ROUND_TRIPS, ids=lambda kind: kind.name)
def test_round_trip_within_the_step_of_the_type(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    values = np.random.default_rng(1).normal(size=(6, 128)).astype(np.float32)
    file = GGUFFile(write_gguf(tmp_path / "f.gguf", "llama", {}, {"w": values}, {"w": kind}))
    loaded = file.load("w")
    assert file.type("w") == kind
    assert loaded.shape == file.shape("w") == (6, 128)
    assert loaded.dtype == np.float32
    blocks = values.reshape(-1, 32)
    bound = np.abs(blocks).max(axis=1, keepdims=True) * ROUND_TRIPS[kind]
    assert (np.abs(loaded.reshape(-1, 32) - blocks) <= bound).all()


@pytest.mark.parametrize("kind", [*ROUND_TRIPS, *K_TYPES, *I_TYPES], ids=lambda kind: kind.name)
def test_pieces_join_to_what_one_call_gives(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Random bytes are valid blocks of every type; the tensor is longer than two pieces."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    rows = 2 * _BLOCKS_PER_PIECE // 8 + 3
    packed = np.random.default_rng(2).integers(0, 256, (rows, 8 * block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(packed, kind)
    path = tmp_path / "f.gguf"
    dims = [expected.shape[1], rows]
    path.write_bytes(raw_gguf(tensors=[raw_tensor("w", dims, kind, 0)], data=packed.tobytes()))
    file = GGUFFile(path)
    np.testing.assert_array_equal(file.load("w"), expected)
    assert file.raw("w").tobytes() == packed.tobytes()
    assert file.raw("w").ctypes.data % ALIGNMENT == 0
    assert file.load("w").ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8, np.int16, np.int32, np.int64])
def test_plain_types_become_float32(dtype: type, tmp_path: Path) -> None:
    values = np.arange(-16, 16, dtype=dtype).reshape(4, 8)
    file = GGUFFile(write_gguf(tmp_path / "f.gguf", "llama", {}, {"w": values}))
    np.testing.assert_array_equal(file.load("w"), values.astype(np.float32))


def test_a_type_without_a_decoder_names_the_tensor(tmp_path: Path) -> None:
    _, block_bytes = GGML_QUANT_SIZES[Q.Q8_K]
    path = tmp_path / "f.gguf"
    content = raw_gguf(tensors=[raw_tensor("w", [256], Q.Q8_K, 0)], data=bytes(block_bytes))
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"f\.gguf: tensor 'w' has the type Q8_K"):
        GGUFFile(path).load("w")
    with pytest.raises(ModelLoadError, match="no tensor 'v'"):
        GGUFFile(path).load("v")


def test_metadata_is_plain_python(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    expected = {
        "u8": (255, gguf.GGUFValueType.UINT8), "i8": (-128, gguf.GGUFValueType.INT8),
        "u16": (65535, gguf.GGUFValueType.UINT16), "i16": (-32768, gguf.GGUFValueType.INT16),
        "u32": (2**32 - 1, gguf.GGUFValueType.UINT32), "i32": (-(2**31), gguf.GGUFValueType.INT32),
        "u64": (2**64 - 1, gguf.GGUFValueType.UINT64), "i64": (-(2**63), gguf.GGUFValueType.INT64),
        "f32": (0.5, gguf.GGUFValueType.FLOAT32), "f64": (0.1, gguf.GGUFValueType.FLOAT64),
        "yes": (True, gguf.GGUFValueType.BOOL), "text": ("Größe 谁", gguf.GGUFValueType.STRING),
    }  # fmt: skip
    for key, (value, kind) in expected.items():
        writer.add_key_value(key, value, kind)
    lists = {
        "ints": [1, 2, 3],
        "floats": [0.5, -1.0],
        "texts": ["", "a", "é"],
        "flags": [True, False],
    }
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "f.gguf").metadata
    want = {"general.architecture": "llama"} | {k: v for k, (v, _) in expected.items()} | lists
    assert metadata == want
    assert {key: type(value) for key, value in metadata.items()} == {
        key: type(value) for key, value in want.items()
    }


def test_alignment_other_than_the_default(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_custom_alignment(128)
    arrays = {f"w{i}": np.full((3, 5), i, np.float32) for i in range(3)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "f.gguf")
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.load(name), array)


def test_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {
        "matrix": rng.normal(size=(4, 64)).astype(np.float32),
        "vector": rng.normal(size=7).astype(np.float32),
        "cube": rng.normal(size=(2, 3, 32)).astype(np.float16),
    }
    metadata = {"llama.block_count": 3, "tokens": ["a", "b"], "scores": [1.5, 2.5]}
    path = write_gguf(tmp_path / "f.gguf", "llama", metadata, tensors, {"matrix": Q.Q4_1})
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.names() == tuple(tensor.name for tensor in theirs.tensors)
    for tensor in theirs.tensors:
        assert ours.type(tensor.name) == tensor.tensor_type
        assert ours.shape(tensor.name) == tuple(reversed(tensor.shape.tolist()))
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()
