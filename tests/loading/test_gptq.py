"""GPTQ layers against a slow formula: bits, groups, order, zero points, wrong labels, damage."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError
from jaxserve.loading.hf_quantization import open_quantized
from pallas_kernels.quantized_matmul import QuantizedArray, check_array, dequantize, matmul
from tests.support import quantized_checkpoints as make

Tensors = dict[str, np.ndarray]
EXPAND = jax.jit(dequantize)


def read(folder: Path, tensors: Tensors, **changed: Any) -> QuantizedArray:
    """The one layer of a folder with these settings."""
    save_file({f"x.{part}": tensors[part] for part in tensors}, folder / "model.safetensors")
    config = {"quantization_config": make.gptq_settings(**changed)}
    packed = open_quantized(folder, config).load_packed("x.weight")
    check_array(packed)
    return packed


def check_refused(folder: Path, tensors: Tensors, problem: str, **changed: Any) -> None:
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read(folder, tensors, **changed)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 500


def check_exact(packed: QuantizedArray, matrix: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(EXPAND(packed)), matrix, rtol=2**-23, atol=0)


@settings(max_examples=24, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    group=st.sampled_from((-1, 8, 32, 48, 64, 128)),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    stored_minus=st.sampled_from((0, 1)),
    size=st.tuples(st.just(32), st.sampled_from((32, 64, 96))),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer_is_its_formula(
    bits: int,
    group: int,
    symmetric: bool,
    act_order: bool,
    stored_minus: int,
    size: tuple[int, int],
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Also groups that do not divide the inputs: the last is shorter, wherever its columns are."""
    tensors, matrix = make.gptq_layer(
        np.random.default_rng(seed), *size, bits=bits, group=group, symmetric=symmetric,
        act_order=act_order, stored_minus=stored_minus,
    )  # fmt: skip
    label = "gptq" if stored_minus else "gptq_v2"
    packed = read(
        tmp_path_factory.mktemp("layer"), tensors,
        bits=bits, group_size=group, sym=symmetric, checkpoint_format=label,
    )  # fmt: skip
    check_exact(packed, matrix)
    assert packed.format_name == ("int8" if bits == 8 else "int4")
    assert act_order or "perm" not in packed.parts


def zero_layer(stored: int, g_idx: np.ndarray) -> Tensors:
    """64 outputs of 64 inputs, every code 8, every scale a half, every stored zero point alike."""
    codes, zeros = np.full((64, 64), 8), np.full((2, 64), stored)
    return {
        "qweight": np.ascontiguousarray(make.packed_rows(codes, 4).T),
        "qzeros": make.packed_rows(zeros, 4),
        "scales": np.full((2, 64), 0.5, np.float16),
        "g_idx": g_idx.astype(np.int32),
    }


@pytest.mark.parametrize(
    ("stored", "label", "warns"),
    [(7, "gptq", False), (8, "gptq_v2", False), (8, "gptq", True), (7, "gptq_v2", True)],
)
def test_b50_zero_points_of_both_versions_and_mislabelled_ones(
    stored: int, label: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    g_idx = np.random.default_rng(0).permutation(np.arange(64) // 32)
    with caplog.at_level(logging.WARNING):
        packed = read(tmp_path, zero_layer(stored, g_idx), sym=True, checkpoint_format=label)
    np.testing.assert_array_equal(np.asarray(dequantize(packed)), np.zeros((64, 64)))
    assert ("zero points are stored as" in caplog.text) == warns


@pytest.mark.parametrize(("stored", "label", "weight"), [(8, "gptq", -0.5), (7, "gptq_v2", 0.5)])
def test_b50_asymmetric_zero_points_are_believed(
    stored: int, label: str, weight: float, tmp_path: Path
) -> None:
    """Without symmetry any zero point may be meant, so the label decides."""
    layer = zero_layer(stored, np.arange(64) // 32)
    packed = read(tmp_path, layer, sym=False, checkpoint_format=label)
    np.testing.assert_array_equal(np.asarray(dequantize(packed)), np.full((64, 64), weight))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_b50_shards_of_an_act_order_layer_keep_its_groups(shards: int, tmp_path: Path) -> None:
    """Split by outputs, or by inputs in the kept order: each part takes the inputs it names."""
    rng = np.random.default_rng(1)
    tensors, matrix = make.gptq_layer(rng, 64, 128, act_order=True)
    packed = read(tmp_path, tensors, desc_act=True)
    x = rng.normal(size=(3, 128)).astype(np.float32)
    whole = np.asarray(matmul(x, packed))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ matrix.T, rtol=1e-5, atol=1e-5)
    rows = [part_of(packed, rows=piece) for piece in halves(64, shards)]
    for part, piece in zip(rows, halves(64, shards), strict=True):
        check_exact(part, matrix[piece])
    np.testing.assert_array_equal(np.concatenate([matmul(x, part) for part in rows], -1), whole)
    total = np.zeros_like(whole)
    for piece in halves(128, shards):
        part = part_of(packed, columns=piece)
        inputs = packed.parts["perm"][piece]
        check_exact(part, matrix[:, inputs])
        total += matmul(x[:, inputs], part)
    np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-5)


def halves(size: int, shards: int) -> list[slice]:
    step = size // shards
    return [slice(start, start + step) for start in range(0, size, step)]


def part_of(
    w: QuantizedArray, rows: slice = slice(None), columns: slice | None = None
) -> QuantizedArray:
    """Some output rows of w, or the columns it keeps at these places, of whole groups."""
    if columns is None:
        parts = {name: part if name == "perm" else part[rows] for name, part in w.parts.items()}
        return replace(w, parts=parts, shape=(rows.stop - rows.start, w.shape[1]))
    per_column = {"codes": 2, "scales": w.group, "zeros": w.group}
    parts = {
        name: w.parts[name][:, columns.start // step : columns.stop // step]
        for name, step in per_column.items()
    }
    part = replace(w, parts=parts, shape=(w.shape[0], columns.stop - columns.start))
    check_array(part)
    return part


def test_zero_points_of_zero_in_version_1(tmp_path: Path) -> None:
    """Taking one off all of a word's zero points borrows across them; adding it gives them back."""
    rng = np.random.default_rng(2)
    tensors, _ = make.gptq_layer(rng, 32, 32)
    zeros = rng.integers(0, 3, (1, 32))
    tensors["qzeros"] = make.packed_rows(zeros, 4) - np.int32(0x11111111)
    packed = read(tmp_path, tensors)
    np.testing.assert_array_equal(packed.parts["zeros"], zeros.T)


def test_a_list_of_groups_may_be_absent_or_empty(tmp_path: Path) -> None:
    tensors, matrix = make.gptq_layer(np.random.default_rng(3), 32, 64)
    for empty in (True, False):
        tensors["g_idx"] = np.zeros(0, np.int32)
        if not empty:
            del tensors["g_idx"]
        check_exact(read(tmp_path, tensors), matrix)


def test_settings_in_the_old_place(tmp_path: Path) -> None:
    tensors, matrix = make.gptq_layer(np.random.default_rng(4), 32, 64)
    save_file({f"x.{part}": tensors[part] for part in tensors}, tmp_path / "model.safetensors")
    (tmp_path / "quantize_config.json").write_text(
        '{"bits": 4, "group_size": 32, "desc_act": false, "sym": false, "model_name_or_path": null}'
    )
    check_exact(open_quantized(tmp_path, {}).load_packed("x.weight"), matrix)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"bits": 5}, "bits is '5'; supported: 2, 3, 4, 8"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": True}, "bits is 'True'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 2**40}, "group_size is"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ({"sym": "yes"}, "sym is 'yes'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported: gptq, awq"),
        ({"quant_method": ["x" * 999]}, "supported: gptq"),
        ({"bits": 8}, r"scales are for 2 groups, but 32 inputs .* are 1"),
        ({"group_size": 16}, r"scales are for 2 groups, but 64 inputs in groups of 16 are 4"),
    ],
)
def test_refused_settings(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    tensors, _ = make.gptq_layer(np.random.default_rng(5), 32, 64)
    check_refused(tmp_path, tensors, problem, **changed)


F16_NAN = np.array([[np.nan] * 32, [1] * 32], np.float16)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"scales": None}, "layer 'x': scales is missing"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"scales": F16_NAN}, "scales holds infinity, NaN"),
        ({"scales": np.full((2, 32), np.inf, np.float16)}, "scales holds infinity, NaN"),
        ({"scales": np.full((2, 32), 1e300)}, "a number too large"),
        ({"scales": np.ones((2, 32), np.int32)}, "scales has the type I32"),
        (
            {"scales": np.ones((2, 31), np.float16)},
            r"scales has the shape \[2, 31\], want \[2, 32\]",
        ),
        ({"scales": np.ones(64, np.float16)}, r"scales has the shape \[64\], want 2 dimensions"),
        ({"qzeros": np.ones((2, 5), np.int32)}, r"qzeros has the shape \[2, 5\], want \[2, 4\]"),
        ({"qzeros": np.ones((2, 4), np.float32)}, "qzeros has the type F32"),
        ({"qweight": np.ones((8, 32), np.int8)}, "qweight has the type I8"),
        ({"qweight": np.ones((7, 32), np.int32)}, "no whole words of 4-bit codes"),
        ({"qweight": np.ones((0, 32), np.int32)}, "qweight has the shape"),
        ({"g_idx": np.zeros(63, np.int32)}, r"g_idx has the shape \[63\]"),
        ({"g_idx": np.full(64, 2, np.int32)}, "names groups 2 to 2, but there are 2"),
        ({"g_idx": np.full(64, -1, np.int32)}, "names groups -1 to -1"),
        ({"g_idx": np.arange(64, dtype=np.int32)}, "names groups 0 to 63"),
        ({"g_idx": np.array([0] * 31 + [1] * 33, np.int32)}, "groups of inputs are of uneven"),
        ({"g_idx": np.zeros(64, np.float32)}, "g_idx has the type F32"),
        ({"weight": np.ones((32, 64), np.float32)}, "'x.weight' is there plain and packed"),
    ],
)
def test_damaged_layers(parts: dict[str, Any], problem: str, tmp_path: Path) -> None:
    tensors, _ = make.gptq_layer(np.random.default_rng(6), 32, 64)
    tensors = {name: part for name, part in (tensors | parts).items() if part is not None}
    check_refused(tmp_path, tensors, problem)
