"""Multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437, section 2.2): a layer that comes with
the target's checkpoint and predicts the token after the next one.

Embedding and feature are normed, joined, brought to the width by `eh_proj` and run through one
decoder layer; the target's unembedding, behind a norm of its own, reads the result. The first
feature is the target's last hidden state. Served here are modules whose layer is a Llama's.
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
from jaxserve.errors import ModelLoadError
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

_NORMS = {
    "embedding_norm": "enorm.weight",
    "feature_norm": "hnorm.weight",
    "attention_norm": "input_layernorm.weight",
    "final_norm": "shared_head.norm.weight",
}
_OTHER_LAYERS = ("kv_lora_rank", "q_lora_rank", "n_routed_experts", "num_experts")


@dataclass(frozen=True)
class MTPConfig:
    """layer: sizes of the module's layer. prefix: of its tensors' names in the checkpoint."""

    layer: llama.LlamaConfig
    prefix: str


def config_from_hf(config: Mapping[str, Any], target: TargetSizes) -> MTPConfig:
    """Of the target's own config.json. The first module is served; it is used again for tokens
    further ahead. Raises ModelLoadError for a layer that is no Llama's."""
    other = [key for key in _OTHER_LAYERS if config.get(key) is not None]
    if other:
        raise ModelLoadError(
            f"config: {other[0]} says that the layers have latent attention or experts; MTP "
            "modules are served whose layer is a Llama's"
        )
    hf_config.positive_int(config, "num_nextn_predict_layers")
    layer = replace(layer_config(config, target), qkv_bias=qkv_bias(config), num_layers=1)
    layer = replace(layer, windows=layer.windows[:1])
    return MTPConfig(layer, f"model.layers.{target.num_layers}.")


def param_specs(config: MTPConfig) -> dict[str, Any]:
    """{"join" [E, 2 E], "layer": {...}, and a norm [E] each for what goes in and out}."""
    E = config.layer.hidden_size
    norms = {name: ParamSpec((E,), (None,), "ones") for name in _NORMS}
    join = matrix((E, 2 * E), ("embed", None))
    return {"join": join, "layer": layer_specs(config.layer, E), **norms}


def weight_names(config: MTPConfig) -> dict[str, Any]:
    """The published names: model.layers.61.enorm.weight, ...eh_proj.weight ..."""
    norms = {name: WeightNames((config.prefix + source,)) for name, source in _NORMS.items()}
    join = WeightNames((config.prefix + "eh_proj.weight",))
    return {"join": join, "layer": layer_names(config.layer, config.prefix), **norms}


def kv_spec(config: MTPConfig) -> KVSpec:
    """One group of one layer."""
    layer = config.layer
    return group_by_window(layer.windows, layer.num_kv_heads, layer.head_dim)


def forward(
    config: MTPConfig,
    params: Params,
    embeddings: jax.Array,
    features: jax.Array,
    batch: StepBatch,
    kv_pool: KVPool,
    ops: Ops,
) -> tuple[jax.Array, KVPool]:
    """The next features [T, E], before the last norm; see `FeatureDraft`."""
    layer_config, layer = config.layer, params["layer"]
    eps = layer_config.rms_norm_eps
    cos, sin = cos_and_sin(layer_config.rope, batch.positions)
    embedded = ops.rms_norm(embeddings, params["embedding_norm"], eps)
    known = ops.rms_norm(features, params["feature_norm"], eps)
    hidden = ops.linear(jnp.concatenate([embedded, known], axis=1), params["join"])
    inputs = ops.rms_norm(hidden, params["attention_norm"], eps)
    q, k, v = queries_keys_values(layer_config, ops, layer, inputs, cos, sin)
    attended, kv_pool = ops.attend(0, q, k, v, kv_pool, batch, scale=layer_config.head_dim**-0.5)
    return llama.attention_output_and_mlp(layer_config, ops, layer, hidden, attended), kv_pool


def _tap_names(config: MTPConfig) -> tuple[str, ...]:  # noqa: ARG001
    return ()


def _fuse(config: MTPConfig, params: Params, captured: jax.Array, ops: Ops) -> jax.Array:  # noqa: ARG001
    return captured


def _logits(
    config: MTPConfig, params: Params, features: jax.Array, unembed: Unembed, ops: Ops
) -> jax.Array:
    return unembed(ops.rms_norm(features, params["final_norm"], config.layer.rms_norm_eps))


def _target_ids(config: MTPConfig, params: Params, ids: jax.Array) -> jax.Array:  # noqa: ARG001
    return ids


MTP = FeatureDraft(
    "mtp", config_from_hf, param_specs, weight_names, kv_spec,
    _tap_names, _fuse, forward, _logits, _target_ids,
)  # fmt: skip
