"""Gemma 3, text only: five layers that look back a window, then one that sees everything.

It differs from Llama in more than settings: embeddings scaled by sqrt(hidden), norms before and
after attention and MLP whose weights are kept as distance from 1, norms of queries and keys, a
RoPE base per kind of layer, and the tanh form of GELU. Hence a file of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.errors import ModelLoadError
from jaxserve.layers.embedding import logits
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norms import centered_rms_norm
from jaxserve.layers.rope import Rope, cos_and_sin
from jaxserve.layers.rope_scaling import make_rope
from jaxserve.models import hf_config
from jaxserve.models.base import (
    ModelDef,
    Params,
    ParamSpec,
    Taps,
    WeightNames,
    layer_input,
    matrix,
)
from jaxserve.models.windows import group_by_window

GLOBAL, LOCAL = "full_attention", "sliding_attention"
DEFAULT_BASE = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
# Before rope_parameters, config.json kept the two bases under these names.
OLDER_BASE_KEY = {GLOBAL: "rope_theta", LOCAL: "rope_local_base_freq"}


@dataclass(frozen=True)
class Gemma3Config:
    """Static description of one checkpoint. windows: per layer, tokens a query sees, or None."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    attention_scale: float
    global_rope: Rope
    local_rope: Rope
    windows: tuple[int | None, ...]
    tied: bool
    attention_bias: bool
    attention_softcap: float | None
    logit_softcap: float | None


def config_from_hf(config: Mapping[str, Any]) -> Gemma3Config:
    """Gemma3Config of a config.json. Raises ModelLoadError on what cannot be computed exactly."""
    if hf_config.flag(config, "use_bidirectional_attention", False):
        raise ModelLoadError(
            "config: use_bidirectional_attention is true; only causal Gemma 3 can be served"
        )
    num_layers = hf_config.positive_int(config, "num_hidden_layers", limit=hf_config.MAX_LAYERS)
    num_heads = hf_config.positive_int(config, "num_attention_heads")
    num_kv_heads = hf_config.key_value_heads(config, num_heads)
    head_dim = hf_config.positive_int(config, "head_dim", 256)
    scalar = hf_config.positive_float(config, "query_pre_attn_scalar", 256.0)
    assert scalar is not None
    global_rope = _rope(config, GLOBAL, head_dim)
    return Gemma3Config(
        vocab_size=hf_config.positive_int(config, "vocab_size"),
        hidden_size=hf_config.positive_int(config, "hidden_size"),
        intermediate_size=hf_config.positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf_config.usable_context(config, global_rope),
        rms_norm_eps=hf_config.norm_eps(config),
        activation=hf_config.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=scalar**-0.5,
        global_rope=global_rope,
        local_rope=_rope(config, LOCAL, head_dim),
        windows=_windows(config, num_layers),
        tied=hf_config.flag(config, "tie_word_embeddings", True),
        attention_bias=hf_config.flag(config, "attention_bias", False),
        attention_softcap=hf_config.positive_float(config, "attn_logit_softcapping"),
        logit_softcap=hf_config.positive_float(config, "final_logit_softcapping"),
    )


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    """The rotation of one kind of layer; an older rope_scaling concerns the global ones alone."""
    both = hf_config.nested(config, "rope_parameters")
    if both and GLOBAL not in both and LOCAL not in both:
        raise ModelLoadError(
            f"config: rope_parameters has keys {str(sorted(both))[:80]}; "
            f"Gemma 3 wants an object each for {GLOBAL} and {LOCAL}"
        )
    parameters = hf_config.nested(both, kind)
    if kind == GLOBAL:
        parameters |= hf_config.nested(config, "rope_scaling")
    if parameters.get("rope_theta") is None:
        older = config.get(OLDER_BASE_KEY[kind])
        parameters["rope_theta"] = DEFAULT_BASE[kind] if older is None else older
    max_position = hf_config.positive_int(config, "max_position_embeddings")
    return make_rope(parameters, head_dim, max_position)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    pattern = hf_config.positive_int(config, "sliding_window_pattern", 6)
    default = tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers))
    kinds = hf_config.layer_types(config, num_layers, default)
    window = hf_config.sliding_window(config, 4096)
    if window is None and LOCAL in kinds:
        raise ModelLoadError(
            f"config: sliding_window is null but {kinds.count(LOCAL)} layers are {LOCAL}; "
            "give the number of tokens they look back"
        )
    return tuple(window if kind == LOCAL else None for kind in kinds)


def param_specs(config: Gemma3Config) -> dict[str, Any]:
    """{"embed" [V, E], "layers": [...], "final_norm" [E], "unembed" [V, E] unless tied}."""
    E = config.hidden_size
    specs = {
        "embed": matrix((config.vocab_size, E), ("vocab", "embed")),
        "layers": [_layer_specs(config) for _ in range(config.num_layers)],
        "final_norm": ParamSpec((E,), (None,), "zeros"),
    }
    if not config.tied:
        specs["unembed"] = matrix((config.vocab_size, E), ("vocab", "embed"))
    return specs


def _layer_specs(config: Gemma3Config) -> dict[str, ParamSpec]:
    """All matrices are [out, in]. Q, K and V are one matrix in that order, gate and up another."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_heads * D
    qkv_size = q_size + 2 * config.num_kv_heads * D
    specs = {
        "attention_norm": ParamSpec((E,), (None,), "zeros"),
        "qkv": matrix((qkv_size, E), ("qkv", "embed")),
        "q_norm": ParamSpec((D,), (None,), "zeros"),
        "k_norm": ParamSpec((D,), (None,), "zeros"),
        "attention_out": matrix((E, q_size), ("embed", "heads")),
        "attention_out_norm": ParamSpec((E,), (None,), "zeros"),
        "mlp_norm": ParamSpec((E,), (None,), "zeros"),
        "gate_up": matrix((2 * F, E), ("gate_up", "embed")),
        "down": matrix((E, F), ("embed", "mlp")),
        "mlp_out_norm": ParamSpec((E,), (None,), "zeros"),
    }
    if config.attention_bias:
        specs["qkv_bias"] = ParamSpec((qkv_size,), ("qkv",), "zeros")
        specs["attention_out_bias"] = ParamSpec((E,), (None,), "zeros")
    return specs


def weight_names(config: Gemma3Config) -> dict[str, Any]:
    """The tree of param_specs with the checkpoint tensors each parameter is joined from."""
    names = {
        "embed": WeightNames(("model.embed_tokens.weight",)),
        "layers": [_layer_names(config, f"model.layers.{i}.") for i in range(config.num_layers)],
        "final_norm": WeightNames(("model.norm.weight",)),
    }
    if not config.tied:
        names["unembed"] = WeightNames(("lm_head.weight",))
    return names


def _layer_names(config: Gemma3Config, prefix: str) -> dict[str, WeightNames]:
    sources = {
        "attention_norm": ("input_layernorm.weight",),
        "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "attention_out": ("self_attn.o_proj.weight",),
        "attention_out_bias": ("self_attn.o_proj.bias",),
        "attention_out_norm": ("post_attention_layernorm.weight",),
        "mlp_norm": ("pre_feedforward_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
        "mlp_out_norm": ("post_feedforward_layernorm.weight",),
    }
    return {
        name: WeightNames(tuple(prefix + source for source in sources[name]))
        for name in _layer_specs(config)
    }


def kv_spec(config: Gemma3Config) -> KVSpec:
    """Groups "windowed" (local layers) and "global"; one of them where all layers are alike."""
    return group_by_window(config.windows, config.num_kv_heads, config.head_dim)


def forward(
    config: Gemma3Config, params: Params, batch: StepBatch, kv_pool: KVPool, ops: Ops
) -> tuple[jax.Array, Taps, KVPool]:
    """All layers over the step's flat tokens. Returns (hidden [T, E], taps, kv_pool).

    Taps are each layer's input [T, E], under `layer_input(index)`.
    """
    hidden = scaled_embedding(ops, params["embed"], batch.tokens)
    local_rotation = cos_and_sin(config.local_rope, batch.positions)
    global_rotation = cos_and_sin(config.global_rope, batch.positions)
    taps = {}
    for index, layer in enumerate(params["layers"]):
        taps[layer_input(index)] = hidden
        window = config.windows[index]
        cos, sin = global_rotation if window is None else local_rotation
        q, k, v = attention_inputs(config, ops, layer, hidden, cos, sin)
        attended, kv_pool = ops.attend(
            index, q, k, v, kv_pool, batch, scale=config.attention_scale,
            window=window, softcap=config.attention_softcap,
        )  # fmt: skip
        hidden = attention_output_and_mlp(config, ops, layer, hidden, attended)
    return centered_rms_norm(ops, hidden, params["final_norm"], config.rms_norm_eps), taps, kv_pool


def scaled_embedding(ops: Ops, table: Any, tokens: jax.Array) -> jax.Array:
    """Rows of table [V, E] times sqrt(E), which is rounded to the rows' dtype as in training:
    in bfloat16 the factor of 640 is 25.25, not 25.298.
    """
    rows = ops.embed(table, tokens)
    return rows * jnp.asarray(rows.shape[1] ** 0.5, rows.dtype)


@partial(jax.jit, static_argnums=(0, 1))
def attention_inputs(
    config: Gemma3Config,
    ops: Ops,
    layer: Params,
    hidden: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms, projections and rotation: q [T, H, D] and k, v [T, K, D] of hidden [T, E].

    A jit inside the step: its trace is shared by all layers, local and global.
    """
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    eps = config.rms_norm_eps
    normed = centered_rms_norm(ops, hidden, layer["attention_norm"], eps)
    qkv = ops.linear(normed, layer["qkv"], layer.get("qkv_bias"))
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    q = ops.rotate(centered_rms_norm(ops, q, layer["q_norm"], eps), cos, sin)
    k = ops.rotate(centered_rms_norm(ops, k, layer["k_norm"], eps), cos, sin)
    return q, k, v


@partial(jax.jit, static_argnums=(0, 1))
def attention_output_and_mlp(
    config: Gemma3Config, ops: Ops, layer: Params, hidden: jax.Array, attended: jax.Array
) -> jax.Array:
    """The rest of the layer: both outputs are normed before they join hidden [T, E]."""
    eps = config.rms_norm_eps
    flat = attended.reshape(attended.shape[0], -1)  # [T, H * D]
    out = ops.linear(flat, layer["attention_out"], layer.get("attention_out_bias"))
    hidden = hidden + centered_rms_norm(ops, out, layer["attention_out_norm"], eps)
    normed = centered_rms_norm(ops, hidden, layer["mlp_norm"], eps)
    out = gated_mlp(ops, config.activation, normed, layer["gate_up"], layer["down"])
    return hidden + centered_rms_norm(ops, out, layer["mlp_out_norm"], eps)


def unembed(config: Gemma3Config, params: Params, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Logits [S, V] float32 of hidden [S, E]."""
    table = params["embed"] if config.tied else params["unembed"]
    return logits(ops, hidden, table, config.logit_softcap)


MODEL = ModelDef("gemma3", config_from_hf, param_specs, weight_names, kv_spec, forward, unembed)
