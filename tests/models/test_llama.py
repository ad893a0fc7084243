"""The Llama family: what config.json says becomes the right configuration, or an error."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.errors import ModelLoadError
from jaxserve.layers.rope import DynamicScaling
from jaxserve.models.llama import MODEL, config_from_hf
from jaxserve.models.registry import find_model
from tests.support.paged_model import PagedModel, random_params

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}


def test_absent_entries_have_the_published_defaults() -> None:
    config = config_from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 6, 1e-6)
    assert (config.activation, config.tied, config.windows) == ("silu", False, (None,) * 3)
    assert config.rope.inv_freq[1] == pytest.approx(10000.0 ** (-1 / 3))
    assert config_from_hf(QWEN3).head_dim == 128


def test_biases_and_norms_follow_the_architecture() -> None:
    def kinds(hf: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        config = config_from_hf(hf)
        return config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm

    told = {"attention_bias": True, "mlp_bias": True}
    assert kinds(LLAMA) == (False, False, False, False)
    assert kinds(LLAMA | told) == (True, True, True, False)
    assert kinds(MISTRAL | told) == (False, False, False, False)
    assert kinds(QWEN2) == (True, False, False, False)
    assert kinds(QWEN3 | told) == (True, True, False, True)


@pytest.mark.parametrize(
    ("hf", "windows"),
    [
        (LLAMA | {"sliding_window": 8}, (None,) * 3),
        (MISTRAL, (4096,) * 3),
        (MISTRAL | {"sliding_window": 8}, (8,) * 3),
        (MISTRAL | {"sliding_window": None}, (None,) * 3),
        (QWEN2 | {"sliding_window": 8}, (None,) * 4),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            QWEN2 | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            QWEN2
            | {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_windows(hf: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = config_from_hf(hf)
    assert config.windows == windows
    spec = MODEL.kv_spec(config)
    for layer, window in enumerate(windows):
        group = spec.groups[spec.group_of_layer(layer)]
        assert group.window == window
        assert group.name == ("global" if window is None else "windowed")
    assert len(spec.groups) == len(set(windows))


def test_both_generations_of_rope_entries() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = LLAMA | {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "rope_theta": 1.0,
        "rope_scaling": None,
    }
    assert config_from_hf(old).rope == config_from_hf(new).rope
    assert config_from_hf(old).rope.inv_freq[0] == pytest.approx(0.25)


def test_dynamic_scaling_stretches_the_context() -> None:
    config = config_from_hf(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert config.rope.dynamic == DynamicScaling(4.0, 64)
    assert config.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act", "quick_gelu", "silu"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1024"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3", "num_attention_heads 4"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "yarn"]),
        ({"rope_scaling": [4.0]}, ["rope_scaling", "list"]),
        ({"head_dim": 5}, ["head_dim", "5"]),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        config_from_hf(LLAMA | change)
    assert all(word in str(error.value) for word in words), error.value


def test_layer_types_are_checked() -> None:
    hf = QWEN2 | {"use_sliding_window": True}
    with pytest.raises(ModelLoadError, match="list of 4"):
        config_from_hf(hf | {"layer_types": ["full_attention"]})
    with pytest.raises(ModelLoadError, match="chunked_attention"):
        config_from_hf(hf | {"layer_types": ["chunked_attention"] * 4})


def test_unknown_architecture_lists_what_exists() -> None:
    with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*--model-file"):
        find_model("GPT2LMHeadModel")


def test_all_layers_share_one_trace() -> None:
    """30 unrolled layers must not cost 30 traces: a product is traced as often as in 2 layers."""
    traced = []
    for layers in (2, 6):
        config = config_from_hf(LLAMA | {"num_hidden_layers": layers, "hidden_size": 32})
        ops = make_ops("reference", MODEL.kv_spec(config))
        calls: list[int] = []

        def linear(*args: Any, calls: list[int] = calls, ops: Any = ops) -> jax.Array:
            calls.append(1)
            return ops.linear(*args)

        def gated(*args: Any, calls: list[int] = calls, ops: Any = ops) -> jax.Array:
            calls.append(1)
            return ops.gated_linear(*args)

        run = PagedModel(MODEL, config, random_params(MODEL, config))
        run.ops = replace(ops, linear=linear, gated_linear=gated)
        run.whole([1, 2, 3])
        traced.append(len(calls))
    assert traced[0] == traced[1] == 5  # qkv, out, gate_up, down; and the logits


def test_bfloat16_follows_float32() -> None:
    config = config_from_hf(LLAMA)
    params = random_params(MODEL, config)
    exact = PagedModel(MODEL, config, params).whole([5, 1, 40, 7])
    half = PagedModel(MODEL, config, jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params))
    got = half.whole([5, 1, 40, 7])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, exact, atol=0.15)
    assert np.abs(got - exact).max() > 0
