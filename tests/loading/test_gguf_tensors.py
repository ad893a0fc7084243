"""GGUF checkpoints give the tensors and the configuration that Hugging Face folders hold."""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hub import resolve
from jaxserve.loading.random_init import random_tensors
from jaxserve.models.registry import find_model
from tests.support.gguf_files import ARCHITECTURES, model_metadata, to_gguf, write_gguf
from tests.support.paged_model import load_golden

ROOT = Path(__file__).resolve().parent.parent
Tensors = dict[str, np.ndarray]


def open_tensors(file: GGUFFile) -> GGUFTensors:
    config = hf_config(file)
    return GGUFTensors(file, config["num_attention_heads"], config["num_key_value_heads"])


def golden_checkpoint(name: str) -> tuple[dict[str, Any], Tensors]:
    """A tiny checkpoint as transformers has it, of tests/goldens."""
    golden = load_golden(name)
    shapes = {name: tuple(shape) for name, shape in golden["shapes"].items()}
    return golden["config"], random_tensors(shapes, golden["seed"], golden["norm_center"])


@pytest.mark.parametrize(
    "name", ["llama", "llama-linear", "llama-yarn", "qwen2", "qwen3", "gemma3"]
)
def test_a_converted_checkpoint_is_the_original(name: str, tmp_path: Path) -> None:
    config, tensors = golden_checkpoint(name)
    _, prefix = ARCHITECTURES[config["architectures"][0]]
    metadata = model_metadata(config)
    if prefix == "gemma3":  # a pattern of 2 instead of the 6 that files leave out
        metadata["gemma3.attention.sliding_window_pattern"] = config["sliding_window_pattern"]
        config["query_pre_attn_scalar"] = config["head_dim"]  # which GGUF implies
    scaling = config.get("rope_scaling") or {}
    if scaling:
        metadata["llama.rope.scaling.type"] = scaling.get("type") or scaling["rope_type"]
        metadata["llama.rope.scaling.factor"] = scaling["factor"]
    if "original_max_position_embeddings" in scaling:
        original = scaling["original_max_position_embeddings"]
        metadata["llama.rope.scaling.original_context_length"] = original
    path = write_gguf(tmp_path / "m.gguf", prefix, metadata, to_gguf(config, tensors))

    file = GGUFFile(path)
    source = open_tensors(file)
    assert set(source.names()) == set(tensors)
    for tensor, values in tensors.items():
        assert source.shape(tensor) == values.shape
        close = 0 if prefix != "gemma3" else 1e-6  # 1 was added and taken off again
        np.testing.assert_allclose(source.load(tensor), values, rtol=0, atol=close)
    model = find_model(config["architectures"][0])
    assert model.config_from_hf(hf_config(file)) == model.config_from_hf(config)


def test_biases_of_q_and_k_are_reordered_like_their_matrices(tmp_path: Path) -> None:
    config, tensors = golden_checkpoint("llama-tied-biases")
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model_metadata(config), to_gguf(config, tensors)
    )
    source = open_tensors(GGUFFile(path))
    for part in "qkvo":
        bias = f"model.layers.1.self_attn.{part}_proj.bias"
        np.testing.assert_array_equal(source.load(bias), tensors[bias])
    config_dict = hf_config(GGUFFile(path))
    assert (config_dict["attention_bias"], config_dict["mlp_bias"]) == (True, True)
    assert config_dict["tie_word_embeddings"] is True


def test_labels_are_the_names_of_the_gguf_package(tmp_path: Path) -> None:
    for name in ("llama", "qwen3", "gemma3"):
        config, tensors = golden_checkpoint(name)
        arch, prefix = ARCHITECTURES[config["architectures"][0]]
        path = write_gguf(
            tmp_path / f"{name}.gguf", prefix, model_metadata(config), to_gguf(config, tensors)
        )
        source = open_tensors(GGUFFile(path))
        name_map = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        for tensor in [*tensors, "lm_head.weight"]:
            assert source.label(tensor) == name_map.get_name(tensor, (".weight", ".bias"))


def test_unknown_tensors_keep_their_names_and_tables_are_left_out(tmp_path: Path) -> None:
    config, tensors = golden_checkpoint("llama")
    extra = {
        "blk.0.attn_sinks.weight": np.ones(6, np.float32),
        "rope_freqs.weight": np.ones(8, np.float32),
        "blk.0.attn_rot_embd.weight": np.ones(8, np.float32),
    }
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model_metadata(config), to_gguf(config, tensors) | extra
    )
    names = set(open_tensors(GGUFFile(path)).names())
    assert names - set(tensors) == {"blk.0.attn_sinks.weight"}


def test_rows_that_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    config, tensors = golden_checkpoint("llama")
    converted = to_gguf(config, tensors)
    converted["blk.0.attn_q.weight"] = converted["blk.0.attn_q.weight"][:-1]
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(config), converted)
    with pytest.raises(
        ModelLoadError, match=r"m\.gguf: tensor 'blk\.0\.attn_q\.weight' has 95 rows"
    ):
        open_tensors(GGUFFile(path)).load("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_tensors_equal_what_transformers_reads_bit_for_bit(name: str) -> None:
    golden = json.loads((ROOT / "goldens" / "gguf" / f"{name}.json").read_text())
    file = GGUFFile(resolve(name))
    source = open_tensors(file)
    assert set(source.names()) == set(golden["tensors"])
    for tensor, expected in golden["tensors"].items():
        values = source.load(tensor)
        flat = values.reshape(-1)
        some = [float(flat[i]) for i in (0, flat.size // 3, flat.size - 1)]
        assert (list(values.shape), some) == (expected["shape"], expected["some"]), tensor
        assert hashlib.sha256(values.tobytes()).hexdigest() == expected["sha256"], tensor


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_configurations_equal_what_transformers_reads(name: str) -> None:
    golden = json.loads((ROOT / "goldens" / "gguf" / f"{name}.json").read_text())
    ours = hf_config(GGUFFile(resolve(name)))
    expected = golden["config"]
    rope = expected.pop("rope_parameters")
    assert ours["rms_norm_eps"] == pytest.approx(expected.pop("rms_norm_eps"), rel=1e-7)
    assert expected.pop("hidden_act", "silu") == "silu"  # the family's default
    assert {key: ours[key] for key in expected} == expected
    if "sliding_attention" in rope:
        assert rope["sliding_attention"]["rope_theta"] == ours["rope_local_base_freq"]
        rope = rope["full_attention"]
    assert rope == {"rope_type": "default", "rope_theta": ours["rope_theta"]}
