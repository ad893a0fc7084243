"""Quantised folders: layers against the packages that write them, and whole tiny checkpoints."""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.core.backends import weight_layout
from jaxserve.errors import ModelLoadError
from jaxserve.loading.assemble import assemble
from jaxserve.loading.hf_quantization import open_quantized
from jaxserve.loading.safetensors_file import SafetensorsFolder
from jaxserve.loading.tensor_source import TensorSource
from jaxserve.models.llama import MODEL
from pallas_kernels.quantized_matmul import QuantizedArray, check_array, dequantize
from tests.support import quantized_checkpoints as make
from tests.support.packed_ways import WAYS
from tests.support.paged_model import PagedModel
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

GOLDENS = Path(__file__).resolve().parent.parent / "goldens/quantized"
SETTINGS = json.loads((GOLDENS / "settings.json").read_text())
RNG = np.random.default_rng
CHANNEL = make.compressed_settings("int-quantized", num_bits=8, type="int", strategy="channel")
PACKED = make.compressed_settings(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
)


def write_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The files of a tiny Llama that loading tensors needs; gives config.json's content."""
    folder.mkdir(exist_ok=True)
    config = LLAMA if settings is None else LLAMA | {"quantization_config": dict(settings)}
    save_file(dict(tensors), folder / "model.safetensors")
    return config


def checkpoint(folder: Path, way: str) -> tuple[TensorSource, dict[str, np.ndarray]]:
    """A tiny Llama packed in this way: (opened, the tensors it stands for)."""
    settings, maker = WAYS[way]
    rng = RNG(3)
    stored, dense = make.packed_checkpoint(tiny_tensors(LLAMA), partial(maker, rng))
    return open_quantized(folder, write_folder(folder, stored, settings)), dense


def layer(folder: Path, tensors: Mapping[str, np.ndarray], settings: Any) -> QuantizedArray:
    """One layer of this name, opened and read."""
    save_file({f"x.{part}": tensors[part] for part in tensors}, folder / "model.safetensors")
    packed = open_quantized(folder, {"quantization_config": settings}).load_packed("x.weight")
    check_array(packed)
    return packed


def expanded(packed: QuantizedArray) -> np.ndarray:
    return np.asarray(dequantize(packed))


def check_exact(packed: QuantizedArray, matrix: np.ndarray) -> None:
    """The expansion is the float64 formula's, rounded once."""
    check_array(packed)
    np.testing.assert_allclose(expanded(packed), matrix, rtol=2**-23, atol=0)


@pytest.mark.parametrize("case", SETTINGS)
def test_layers_mean_what_their_writers_say(case: str, tmp_path: Path) -> None:
    """Bit by bit what AutoGPTQ, AutoAWQ, compressed-tensors and transformers expand them to."""
    goldens = SafetensorsFolder(GOLDENS)
    parts = [name for name in goldens.names() if name.startswith(f"{case}.")]
    tensors = {name.removeprefix(f"{case}."): goldens.raw(name) for name in parts}
    want = tensors.pop("expanded")
    for name, part in tensors.items():
        if goldens.dtype(f"{case}.{name}") == "F8_E4M3":
            tensors[name] = part.view(make.ml_dtypes.float8_e4m3fn)
    packed = layer(tmp_path, tensors, SETTINGS[case])
    np.testing.assert_array_equal(expanded(packed), want)
    source = open_quantized(tmp_path, {"quantization_config": SETTINGS[case]})
    np.testing.assert_array_equal(source.load("x.weight"), want)
    assert source.shape("x.weight") == packed.shape == want.shape
    assert list(source.names()) == ["x.weight"]
    assert packed.nbytes < want.nbytes * (0.3 if packed.format_name == "int4" else 0.4)


@pytest.mark.parametrize("layout", sorted({"rows", weight_layout("auto") or "rows"}))
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_says_what_its_expansion_says(way: str, layout: str, tmp_path: Path) -> None:
    source, dense = checkpoint(tmp_path, way)
    assert set(source.names()) == set(dense)
    config = MODEL.config_from_hf(LLAMA)
    packed = assemble(MODEL, config, source, "float32", layout=layout)
    plain = assemble(MODEL, config, source, "float32")
    folder = tmp_path / "plain"
    expansion = open_quantized(folder, write_folder(folder, dense, None))
    assert isinstance(expansion, SafetensorsFolder)
    want = assemble(MODEL, config, expansion, "float32")
    for got, wanted in zip(jax.tree.leaves(plain), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2**-22)
    tokens = [5, 250, 17, 3, 99]
    logits = PagedModel(MODEL, config, want).whole(tokens)
    assert np.abs(logits).max() > 0.1
    np.testing.assert_allclose(
        PagedModel(MODEL, config, packed).whole(tokens), logits, rtol=1e-5, atol=1e-5
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(packed["layers"]))
    assert held < 0.4 * sum(leaf.nbytes for leaf in jax.tree.leaves(want["layers"]))


def test_names_and_labels_are_those_of_logical_tensors(tmp_path: Path) -> None:
    source, dense = checkpoint(tmp_path, "gptq")
    name = "model.layers.0.mlp.up_proj.weight"
    assert source.label(name) == "model.layers.0.mlp.up_proj.qweight"
    assert source.label("lm_head.weight") == "lm_head.weight"
    assert source.label("absent.weight") == "absent.weight"
    assert source.load_packed("lm_head.weight").format_name == "f32"
    for name, tensor in dense.items():
        assert source.shape(name) == tensor.shape


def stored_gptq(**extra: np.ndarray) -> dict[str, np.ndarray]:
    rng = RNG(3)
    stored, _ = make.packed_checkpoint(tiny_tensors(LLAMA), partial(make.gptq_layer, rng))
    return stored | extra


def assemble_gptq(folder: Path, stored: Mapping[str, np.ndarray]) -> Any:
    source = open_quantized(folder, write_folder(folder, stored, make.gptq_settings()))
    return assemble(MODEL, MODEL.config_from_hf(LLAMA), source, "float32", layout="rows")


def test_biases_that_writers_add_may_be_left_over_if_zero(tmp_path: Path) -> None:
    bias = "model.layers.1.self_attn.o_proj.bias"
    assemble_gptq(tmp_path, stored_gptq(**{bias: np.zeros(64, np.float16)}))
    with pytest.raises(ModelLoadError, match=f"not wanted by the model: {bias}"):
        assemble_gptq(tmp_path, stored_gptq(**{bias: np.ones(64, np.float16)}))
    with pytest.raises(ModelLoadError, match=r"not wanted by the model: model\.norm\.bias"):
        assemble_gptq(tmp_path, stored_gptq(**{"model.norm.bias": np.zeros(64, np.float16)}))


def test_missing_and_left_over_tensors_are_listed(tmp_path: Path) -> None:
    layer = "model.layers.1.self_attn.v_proj"
    stored = stored_gptq(**{"model.layers.7.mlp.up_proj.scales": np.ones((1, 8), np.float16)})
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del stored[f"{layer}.{part}"]
    with pytest.raises(ModelLoadError) as caught:
        assemble_gptq(tmp_path, stored)
    assert f"1 missing: {layer}.weight" in str(caught.value)
    assert "1 not wanted by the model: model.layers.7.mlp.up_proj.scales" in str(caught.value)
    packed, _ = make.gptq_layer(RNG(0), 64, 96)
    stored = stored_gptq(**{f"{layer}.{part}": packed[part] for part in packed})
    with pytest.raises(ModelLoadError, match=r"of another shape: .*v_proj\.qweight \[64, 96\]"):
        assemble_gptq(tmp_path, stored)


def test_a_quantised_folder_without_packed_layers(tmp_path: Path) -> None:
    config = write_folder(tmp_path, tiny_tensors(LLAMA), make.gptq_settings())
    with pytest.raises(ModelLoadError, match=r"quantised \(GPTQ, 4 bits\), but no layer is"):
        open_quantized(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'; supported: gptq"),
        ({"quant_method": "bitsandbytes"}, "or the unquantised checkpoint with --quantization"),
        ({}, "quantised by 'None'"),
        ("gptq", "quantization_config is no object"),
        (make.awq_settings(version="gemv_fast"), "version is 'gemv_fast'; supported: 'gemm'"),
        (make.awq_settings(version=7), "version is '7'"),
        (make.awq_settings(bits=3), "bits is '3'"),
        (make.awq_settings(zero_point=False), "zero_point is 'False'"),
        (make.awq_settings(group_size=None), "group_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is '\[128\]'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "want two whole numbers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "compressed-tensors"}, "want 1 to 64 config_groups"),
        (make.compressed_settings("nvfp4-pack-quantized", num_bits=4), "format is 'nvfp4"),
        (make.compressed_settings("marlin-24", num_bits=4), "format is 'marlin-24'"),
        (make.compressed_settings("pack-quantized", num_bits=3), "num_bits is '3'"),
        (make.compressed_settings("float-quantized", num_bits=4, type="float"), "num_bits is '4'"),
        (make.compressed_settings("int-quantized", strategy="token"), "strategy is 'token'"),
        (
            make.compressed_settings("int-quantized") | {"sparsity_config": {"format": "2:4"}},
            "format is '2:4'; supported: 'dense'",
        ),
        (PACKED | {"config_groups": {"a": {}}}, "no settings of weights"),
        (PACKED | {"transform_config": {"r1": {}}}, "rotations of activations"),
    ],
)
def test_refused_settings_name_the_folder(settings: Any, problem: str, tmp_path: Path) -> None:
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=problem) as caught:
        open_quantized(tmp_path, {"quantization_config": settings})
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("size", [(40, 80), (128, 128), (130, 200), (257, 384)])
def test_fp8_blocks_at_the_ends_may_be_partial(size: tuple[int, int], tmp_path: Path) -> None:
    tensors, matrix = make.fp8_layer(RNG(5), *size)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    packed = layer(tmp_path, tensors, settings)
    check_exact(packed, matrix)
    assert packed.group == {80: 80, 128: 128, 200: 8, 384: 128}[size[1]]


@pytest.mark.parametrize("shape", [(), (1,), (24,), (24, 1)])
def test_fp8_with_one_scale_or_one_per_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    per_row = shape[:1] == (24,)
    tensors, matrix = make.fp8_layer(
        RNG(6), 24, 40, block=(1 if per_row else 24, 40), part="weight_scale"
    )
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape)
    tensors["input_scale"] = np.ones(1, np.float32)
    for method in ("fp8", "fbgemm_fp8"):
        check_exact(layer(tmp_path, tensors, {"quant_method": method}), matrix)


def test_fp8_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    tensors, _ = make.fp8_layer(RNG(7), 16, 16, block=(16, 16))
    exponents = np.array([[120]], np.uint8)
    scaled = make.e4m3(int(tensors["weight"].view(np.uint8)[3, 4])) * 2.0 ** (120 - 127)
    tensors["weight_scale_inv"] = exponents.view(make.ml_dtypes.float8_e8m0fnu)
    packed = layer(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    assert expanded(packed)[3, 4] == scaled
    tensors["weight_scale_inv"] = np.array([[255]], np.uint8).view(make.ml_dtypes.float8_e8m0fnu)
    with pytest.raises(ModelLoadError, match="weight_scale_inv holds infinity, NaN"):
        layer(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NAN_WEIGHT = np.full((16, 64), 0xFF, np.uint8).view(make.ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("maker", "settings", "parts", "problem"),
    [
        (make.fp8_layer, FP8, {"weight": NAN_WEIGHT}, "weight holds NaN"),
        (make.fp8_layer, FP8, {"weight_scale_inv": None}, "weight_scale is missing"),
        (
            make.fp8_layer, FP8, {"weight_scale_inv": np.ones((1, 2), np.float32)},
            r"weight_scale_inv has the shape \[1, 2\]; for \[16, 64\] want one per block of",
        ),
        (
            make.fp8_layer, FP8, {"weight_scale_inv": np.full((1, 1), np.nan, np.float32)},
            "weight_scale_inv holds infinity, NaN",
        ),
        (make.int8_layer, CHANNEL, {"weight_scale": None}, "weight_scale is missing"),
        (
            make.int8_layer, CHANNEL, {"weight_scale": np.ones((16, 2), np.float32)},
            "fits none of the config_groups",
        ),
        (
            make.int8_layer, CHANNEL, {"weight_zero_point": np.ones((8, 1), np.int8)},
            r"weight_zero_point has the shape \[8, 1\]",
        ),
        (
            make.packed_layer, PACKED, {"weight_shape": np.array([16, 65])},
            "fits none of the config_groups",
        ),
        (
            make.packed_layer, PACKED, {"weight_shape": np.array([2**40, 2**40])},
            r"weight_shape is \[1099511627776, 1099511627776\], which does not fit",
        ),
        (make.packed_layer, PACKED, {"weight_shape": np.array([16, -64])}, "does not fit"),
        (make.packed_layer, PACKED, {"weight_shape": None}, "weight_shape is missing"),
        (
            make.packed_layer, PACKED, {"weight_zero_point": np.ones((3, 2), np.int32)},
            r"weight_zero_point has the shape \[3, 2\], want \[2, 2\]",
        ),
        (
            make.packed_layer, PACKED, {"weight_zero_point": np.full((16, 2), 8, np.int8)},
            "weight_zero_point is outside the range of 4 bits",
        ),
        (
            make.packed_layer, PACKED, {"weight_g_idx": np.full(64, 9, np.int32)},
            "names groups 9 to 9, but there are 2",
        ),
        (
            make.packed_layer, PACKED, {"weight_g_idx": np.zeros(7, np.int32)},
            r"weight_g_idx has the shape \[7\]",
        ),
        (
            make.awq_layer, make.awq_settings(), {"qzeros": np.ones((2, 3), np.int32)},
            r"qzeros has the shape \[2, 3\], want \[2, 2\]",
        ),
        (
            make.awq_layer, make.awq_settings(version="gemv"), {},
            "scales has the shape|not whole groups",
        ),
        (make.awq_layer, make.awq_settings(group_size=48), {}, "64 inputs are not whole groups"),
    ],
)  # fmt: skip
def test_damaged_layers(
    maker: Any, settings: Any, parts: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    tensors, _ = maker(RNG(8), 16, 64)
    tensors = {name: part for name, part in (tensors | parts).items() if part is not None}
    with pytest.raises(ModelLoadError, match=problem) as caught:
        layer(tmp_path, tensors, settings)
    assert "layer 'x': " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_zero_points_and_groups_that_were_never_filled_in(tmp_path: Path) -> None:
    tensors, matrix = make.packed_layer(RNG(9), 16, 64, symmetric=True)
    settings = make.compressed_settings(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
    )
    tensors["weight_g_idx"] = np.full(64, -1, np.int32)
    tensors["weight_zero_point"] = np.zeros((16, 2), np.int8)  # as older writers kept them
    check_exact(layer(tmp_path, tensors, settings), matrix)


def test_layers_of_several_schemes(tmp_path: Path) -> None:
    """Which of the groups a layer follows is read off its tensors."""
    one, int4 = make.packed_layer(RNG(10), 16, 64)
    two, int8 = make.int8_layer(RNG(11), 16, 64)
    four = PACKED["config_groups"]["group_0"] | {"format": "pack-quantized"}
    eight = CHANNEL["config_groups"]["group_0"] | {
        "format": "int-quantized", "input_activations": {"num_bits": 8, "dynamic": True},
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"a": four, "b": eight},
    }
    tensors = {f"four.{part}": one[part] for part in one} | {
        f"eight.{part}": two[part] for part in two
    }
    tensors["plain.weight"] = np.ones((2, 2), np.float16)
    tensors["attention.k_scale"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_quantized(tmp_path, {"quantization_config": settings})
    assert sorted(source.names()) == ["eight.weight", "four.weight", "plain.weight"]
    check_exact(source.load_packed("four.weight"), int4)
    check_exact(source.load_packed("eight.weight"), int8)
    assert source.load_packed("plain.weight").format_name == "f16"


def test_activations_stay_float_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, _ = make.int8_layer(RNG(12), 16, 64)
    settings = json.loads(json.dumps(CHANNEL))
    with caplog.at_level(logging.INFO):
        layer(tmp_path, tensors, settings)
    assert "8-bit activations" not in caplog.text
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    with caplog.at_level(logging.INFO):
        layer(tmp_path, tensors, settings)
    assert "8-bit activations; they stay float" in caplog.text
    assert "compressed-tensors: 1 packed layers" in caplog.text
