"""Metadata of GGUF files in config.json's terms: what files say, leave out, or cannot mean."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.models.llama import MODEL as LLAMA_MODEL
from tests.support.gguf_files import model_metadata, to_gguf, write_gguf
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors


def config_of(
    path: Path, extra: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """hf_config of a tiny Llama with some metadata and tensors more."""
    metadata = model_metadata(LLAMA) | (extra or {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    held = to_gguf(LLAMA, tiny_tensors(LLAMA)) | (tensors or {})
    return hf_config(GGUFFile(write_gguf(path / "m.gguf", "llama", metadata, held)))


def gemma(path: Path, layers: int = 7, **extra: Any) -> dict[str, Any]:
    """hf_config of a Gemma 3 file that has one tensor a layer."""
    metadata = {
        "gemma3.block_count": layers, "gemma3.context_length": 4096,
        "gemma3.embedding_length": 64, "gemma3.feed_forward_length": 96,
        "gemma3.attention.head_count": 2, "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 16, "gemma3.attention.value_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6, "gemma3.attention.sliding_window": 512,
    } | extra  # fmt: skip
    tensors = {f"blk.{i}.attn_norm.weight": np.ones(64, np.float32) for i in range(layers)}
    tensors["token_embd.weight"] = np.ones((40, 64), np.float32)
    return hf_config(GGUFFile(write_gguf(path / "g.gguf", "gemma3", metadata, tensors)))


def test_b24_rope_freqs_tensor_holds_divisors(tmp_path: Path) -> None:
    """Llama 3's rule as the converter stores it, for base 5e5 and heads of 64: 1, ramp, 32."""
    expected = np.ones(32)
    expected[15:18] = 1.651329, 3.292262, 9.666729
    expected[18:] = 32
    config = config_of(
        tmp_path,
        {"llama.rope.freq_base": 5e5, "llama.attention.key_length": 64,
         "llama.attention.value_length": 64, "llama.rope.dimension_count": 64},
        {"rope_freqs.weight": expected.astype(np.float32)},
    )  # fmt: skip
    assert config["rope_scaling"]["rope_type"] == "factors"
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    rope = LLAMA_MODEL.config_from_hf(config).rope
    np.testing.assert_allclose(rope.inv_freq, plain / expected, rtol=1e-6)
    llama3 = config | {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }
    }  # fmt: skip
    same_rule = LLAMA_MODEL.config_from_hf(llama3).rope
    np.testing.assert_allclose(rope.inv_freq, same_rule.inv_freq, rtol=1e-6)


def test_b24_linear_and_yarn_and_none(tmp_path: Path) -> None:
    key = "llama.rope.scaling."
    assert config_of(tmp_path)["rope_scaling"] is None
    assert config_of(tmp_path, {key + "type": "none"})["rope_scaling"] is None
    linear = {"rope_type": "linear", "factor": 4.0}
    given = config_of(tmp_path, {key + "type": "linear", key + "factor": 4.0})
    assert given["rope_scaling"] == linear
    assert config_of(tmp_path, {"llama.rope.scale_linear": 4.0})["rope_scaling"] == linear
    yarn = {key + "type": "yarn", key + "factor": 4.0, key + "original_context_length": 32}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config_of(tmp_path, yarn)["rope_scaling"] == expected
    more = {key + "yarn_beta_fast": 16.0, key + "yarn_beta_slow": 2.0, key + "attn_factor": 0.5}
    scaling = config_of(tmp_path, yarn | more)["rope_scaling"]
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (16.0, 2.0)
    assert scaling["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_the_embedding_says_how_many_ids_there_are(tmp_path: Path) -> None:
    assert config_of(tmp_path, {"llama.vocab_size": 5})["vocab_size"] == LLAMA["vocab_size"]


def test_what_files_may_leave_out(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        dict.fromkeys(
            ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base",
             "llama.rope.dimension_count", "llama.attention.head_count_kv")
        ),
    )  # fmt: skip
    assert config["head_dim"] == 64 // 4
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10_000.0
    assert config["rms_norm_eps"] == 1e-5  # not float32's 9.99999975e-06


def test_a_list_with_one_value_a_layer(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    assert config_of(tmp_path, {key: [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ModelLoadError, match=f"{key} differs between layers"):
        config_of(tmp_path, {key: [2, 1]})


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"llama.attention.sliding_window": 12})
    assert config["architectures"] == ["MistralForCausalLM"]
    assert LLAMA_MODEL.config_from_hf(config).windows == (12, 12)
    config = config_of(tmp_path, {"llama.attention.sliding_window": 0})
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_gemma_three_by_what_its_files_leave_out(tmp_path: Path) -> None:
    config = gemma(tmp_path)
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["layer_types"] == kinds
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["query_pre_attn_scalar"] == 16
    assert config["tie_word_embeddings"] is True
    assert gemma(tmp_path, 62)["query_pre_attn_scalar"] == 64 // 2
    pattern = "gemma3.attention.sliding_window_pattern"
    listed = gemma(tmp_path, 2, **{pattern: [False, True], "gemma3.rope.freq_base_swa": 2e4})
    assert listed["layer_types"] == ["full_attention", "sliding_attention"]
    assert listed["rope_local_base_freq"] == 2e4
    with pytest.raises(ModelLoadError, match="wants 3 booleans"):
        gemma(tmp_path, 3, **{pattern: [False, True]})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("llama.block_count", 3, "is 3, but 2 blocks have tensors"),
        ("llama.block_count", 2**31, "whole number"),
        ("llama.embedding_length", 0, "is 0; want a whole number"),
        ("llama.embedding_length", None, "is missing"),
        ("llama.context_length", "long", "is long"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "is nan"),
        ("llama.rope.freq_base", -1.0, "is -1.0; want a number above 0"),
        ("llama.expert_count", 8, "mixtures of experts"),
        ("llama.attention.value_length", 8, "differs from the key length 16"),
        ("llama.rope.dimension_count", 8, "rotates a part"),
        ("llama.rope.scaling.type", "longrope", "'longrope'; known: none, linear, yarn"),
        ("llama.rope.scaling.type", "linear", "scaling.factor is missing"),
    ],
)
def test_refused_metadata(key: str, value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=problem) as caught:
        config_of(tmp_path, {key: value})
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_refused_yarn_variants_and_two_kinds_of_scaling(tmp_path: Path) -> None:
    key = "llama.rope.scaling."
    yarn = {key + "type": "yarn", key + "factor": 4.0, key + "original_context_length": 32}
    with pytest.raises(ModelLoadError, match="yarn_log_multiplier is set"):
        config_of(tmp_path, yarn | {key + "yarn_log_multiplier": 0.1})
    divisors = {"rope_freqs.weight": np.ones(8, np.float32)}
    with pytest.raises(ModelLoadError, match=r"set beside the tensor rope_freqs\.weight"):
        config_of(tmp_path, yarn, divisors)
    with pytest.raises(ModelLoadError, match="want a number per pair"):
        config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(5000, np.float32)})


def test_unknown_architectures(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {"w": np.ones(32, np.float32)})
    with pytest.raises(ModelLoadError, match="'mamba'; GGUF files can be llama, qwen2"):
        hf_config(GGUFFile(path))


def test_a_missing_embedding(tmp_path: Path) -> None:
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(LLAMA), tensors)
    with pytest.raises(ModelLoadError, match=r"no tensor 'token_embd\.weight'"):
        hf_config(GGUFFile(path))
