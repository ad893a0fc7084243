"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): features of three depths, a vocabulary of its own.

The inputs of a low, a middle and a high layer of the target are joined and brought to the width by
`fc`. One decoder layer reads the normed embedding beside the normed feature. Its output is the next
feature and, normed, what the draft's own unembedding reads, over the words that the target uses
most: draft word j is the target's j + d2t[j], and t2d says which of the target's words there are.
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
from jaxserve.layers.embedding import logits
from jaxserve.layers.rope import cos_and_sin
from jaxserve.models import hf_config, llama
from jaxserve.models.base import Params, ParamSpec, WeightNames, layer_input, matrix
from jaxserve.models.drafts.base import FeatureDraft, TargetSizes, Unembed
from jaxserve.models.drafts.eagle_layer import (
    layer_config,
    layer_names,
    layer_specs,
    qkv_bias,
    queries_keys_values,
)
from jaxserve.models.windows import group_by_window

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # in config.json, or its object eagle_config


@dataclass(frozen=True)
class Eagle3Config:
    """layer: sizes of the one decoder layer. draft_vocab_size: rows of the draft's unembedding.

    target_layers: whose inputs are fused.
    """

    layer: llama.LlamaConfig
    draft_vocab_size: int
    target_layers: tuple[int, ...]


def config_from_hf(config: Mapping[str, Any], target: TargetSizes) -> Eagle3Config:
    """Eagle3Config of a config.json; draft_vocab_size absent: the target's whole vocabulary."""
    layer = replace(layer_config(config, target), qkv_bias=qkv_bias(config))
    if layer.num_layers != 1:
        raise ModelLoadError(
            f"config: num_hidden_layers is {layer.num_layers}; EAGLE-3 has one decoder layer"
        )
    draft_vocab_size = hf_config.positive_int(
        config, "draft_vocab_size", target.vocab_size, limit=target.vocab_size
    )
    return Eagle3Config(layer, draft_vocab_size, _target_layers(config, target.num_layers))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers of the target that EAGLE-3 reads where its config does not say."""
    return 2, num_layers // 2, num_layers - 3


def _target_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    given = hf_config.nested(config, "eagle_config").get(_LAYER_IDS, config.get(_LAYER_IDS))
    layers = default_layers(num_layers) if given is None else given
    usable = isinstance(layers, list | tuple) and 0 < len(layers) <= num_layers
    if not usable or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise ModelLoadError(
            f"config: {_LAYER_IDS} is {str(layers)[:60]}; want layers 0 to {num_layers - 1} of the "
            "target, whose inputs are read"
        )
    return tuple(layers)


def param_specs(config: Eagle3Config) -> dict[str, Any]:
    """d2t [draft vocabulary] int32 is what is added to a draft's id to get the target's."""
    E, layer = config.layer.hidden_size, config.layer
    norm = ParamSpec((E,), (None,), "ones")
    return {
        "fc": matrix((E, len(config.target_layers) * E), ("embed", None)),
        "layer": layer_specs(layer, 2 * E) | {"embedding_norm": norm, "feature_norm": norm},
        "final_norm": norm,
        "unembed": matrix((config.draft_vocab_size, E), ("vocab", "embed")),
        "d2t": ParamSpec((config.draft_vocab_size,), (None,), "zeros", "int32"),
    }


def weight_names(config: Eagle3Config) -> dict[str, Any]:
    """The published names: fc.weight, midlayer.hidden_norm.weight, lm_head.weight, d2t ..."""
    return {
        "fc": WeightNames(("fc.weight",)),
        "layer": layer_names(config.layer, "midlayer.")
        | {
            "embedding_norm": WeightNames(("midlayer.input_layernorm.weight",)),
            "feature_norm": WeightNames(("midlayer.hidden_norm.weight",)),
        },
        "final_norm": WeightNames(("norm.weight",)),
        "unembed": WeightNames(("lm_head.weight",)),
        "d2t": WeightNames(("d2t",)),
    }


def kv_spec(config: Eagle3Config) -> KVSpec:
    """One group of one layer."""
    layer = config.layer
    return group_by_window(layer.windows, layer.num_kv_heads, layer.head_dim)


def tap_names(config: Eagle3Config) -> tuple[str, ...]:
    """The target's taps to join, low to high as the config lists them."""
    return tuple(layer_input(index) for index in config.target_layers)


def fuse(config: Eagle3Config, params: Params, captured: jax.Array, ops: Ops) -> jax.Array:  # noqa: ARG001
    """Features [T, E] of captured [T, len(target_layers) * E]."""
    return ops.linear(captured, params["fc"])


def forward(
    config: Eagle3Config,
    params: Params,
    embeddings: jax.Array,
    features: jax.Array,
    batch: StepBatch,
    kv_pool: KVPool,
    ops: Ops,
) -> tuple[jax.Array, KVPool]:
    """The next features [T, E]; see `FeatureDraft`."""
    layer_config, layer = config.layer, params["layer"]
    cos, sin = cos_and_sin(layer_config.rope, batch.positions)
    inputs = pair_inputs(config, params, embeddings, features, ops)
    q, k, v = queries_keys_values(layer_config, ops, layer, inputs, cos, sin)
    attended, kv_pool = ops.attend(0, q, k, v, kv_pool, batch, scale=layer_config.head_dim**-0.5)
    hidden = llama.attention_output_and_mlp(layer_config, ops, layer, features, attended)
    return hidden, kv_pool


def pair_inputs(
    config: Eagle3Config, params: Params, embeddings: jax.Array, features: jax.Array, ops: Ops
) -> jax.Array:
    """What the layer's attention reads, [T, 2 E]: both normed, the embedding first."""
    layer, eps = params["layer"], config.layer.rms_norm_eps
    embedded = ops.rms_norm(embeddings, layer["embedding_norm"], eps)
    return jnp.concatenate([embedded, ops.rms_norm(features, layer["feature_norm"], eps)], axis=1)


def draft_logits(
    config: Eagle3Config,
    params: Params,
    features: jax.Array,
    unembed: Unembed,  # noqa: ARG001
    ops: Ops,
) -> jax.Array:
    """float32 [S, draft_vocab_size] of features [S, E]."""
    normed = ops.rms_norm(features, params["final_norm"], config.layer.rms_norm_eps)
    return logits(ops, normed, params["unembed"])


def target_ids(config: Eagle3Config, params: Params, ids: jax.Array) -> jax.Array:  # noqa: ARG001
    """The target's ids of the draft's."""
    return (ids + params["d2t"][ids]).astype(jnp.int32)


EAGLE3 = FeatureDraft(
    "eagle3", config_from_hf, param_specs, weight_names, kv_spec,
    tap_names, fuse, forward, draft_logits, target_ids,
)  # fmt: skip
