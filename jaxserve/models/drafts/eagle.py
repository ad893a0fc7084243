"""EAGLE (Li et al. 2024, arXiv:2401.15077): autoregression over the target's last hidden states.

Embedding and feature are joined and brought back to the width by `fc`, then run through one decoder
layer without a norm in front; its output is the next feature, and the target's own unembedding
reads it. So a feature is what the target's forward returns: hidden states after the final norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.layers.rope import cos_and_sin
from jaxserve.models import hf_config, llama
from jaxserve.models.base import Params, ParamSpec, WeightNames, matrix
from jaxserve.models.drafts.base import FeatureDraft, TargetSizes, Unembed
from jaxserve.models.drafts.eagle_layer import (
    layer_config,
    layer_names,
    layer_specs,
    qkv_bias,
    queries_keys_values,
)
from jaxserve.models.windows import group_by_window


@dataclass(frozen=True)
class EagleConfig:
    """layer: sizes of the decoder layers, and how many there are. fc_bias: the join has a bias."""

    layer: llama.LlamaConfig
    fc_bias: bool


def config_from_hf(config: Mapping[str, Any], target: TargetSizes) -> EagleConfig:
    """EagleConfig of a config.json, in which `bias` (of fc) is true unless it says otherwise."""
    layer = replace(layer_config(config, target), qkv_bias=qkv_bias(config))
    return EagleConfig(layer, hf_config.flag(config, "bias", True))


def param_specs(config: EagleConfig) -> dict[str, Any]:
    """{"fc" [E, 2 E], "fc_bias" [E], "layers": [...]}; all but the first norm their input."""
    E = config.layer.hidden_size
    layers = [layer_specs(config.layer, E) for _ in range(config.layer.num_layers)]
    for layer in layers[1:]:
        layer["attention_norm"] = ParamSpec((E,), (None,), "ones")
    specs: dict[str, Any] = {"fc": matrix((E, 2 * E), ("embed", None)), "layers": layers}
    if config.fc_bias:
        specs["fc_bias"] = ParamSpec((E,), (None,), "zeros")
    return specs


def weight_names(config: EagleConfig) -> dict[str, Any]:
    """The published names: fc.weight, fc.bias, layers.0.self_attn.q_proj.weight ..."""
    layers = [layer_names(config.layer, f"layers.{i}.") for i in range(config.layer.num_layers)]
    for index, layer in enumerate(layers[1:], 1):
        layer["attention_norm"] = WeightNames((f"layers.{index}.input_layernorm.weight",))
    names: dict[str, Any] = {"fc": WeightNames(("fc.weight",)), "layers": layers}
    if config.fc_bias:
        names["fc_bias"] = WeightNames(("fc.bias",))
    return names


def kv_spec(config: EagleConfig) -> KVSpec:
    """One group: every layer sees everything."""
    layer = config.layer
    return group_by_window(layer.windows, layer.num_kv_heads, layer.head_dim)


def forward(
    config: EagleConfig,
    params: Params,
    embeddings: jax.Array,
    features: jax.Array,
    batch: StepBatch,
    kv_pool: KVPool,
    ops: Ops,
) -> tuple[jax.Array, KVPool]:
    """The next features [T, E]; see `FeatureDraft`."""
    layer_config = config.layer
    cos, sin = cos_and_sin(layer_config.rope, batch.positions)
    pair = jnp.concatenate([embeddings, features], axis=1)
    hidden = ops.linear(pair, params["fc"], params.get("fc_bias"))
    for index, layer in enumerate(params["layers"]):
        inputs = hidden
        if "attention_norm" in layer:
            inputs = ops.rms_norm(hidden, layer["attention_norm"], layer_config.rms_norm_eps)
        q, k, v = queries_keys_values(layer_config, ops, layer, inputs, cos, sin)
        attended, kv_pool = ops.attend(
            index, q, k, v, kv_pool, batch, scale=layer_config.head_dim**-0.5
        )
        hidden = llama.attention_output_and_mlp(layer_config, ops, layer, hidden, attended)
    return hidden, kv_pool


def _tap_names(config: EagleConfig) -> tuple[str, ...]:  # noqa: ARG001
    return ()


def _fuse(config: EagleConfig, params: Params, captured: jax.Array, ops: Ops) -> jax.Array:  # noqa: ARG001
    return captured


def _logits(
    config: EagleConfig,  # noqa: ARG001
    params: Params,  # noqa: ARG001
    features: jax.Array,
    unembed: Unembed,
    ops: Ops,  # noqa: ARG001
) -> jax.Array:
    return unembed(features)


def _target_ids(config: EagleConfig, params: Params, ids: jax.Array) -> jax.Array:  # noqa: ARG001
    return ids


EAGLE = FeatureDraft(
    "eagle", config_from_hf, param_specs, weight_names, kv_spec,
    _tap_names, _fuse, forward, _logits, _target_ids,
)  # fmt: skip
