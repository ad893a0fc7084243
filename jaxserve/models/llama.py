"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3.

One decoder: RMSNorm, grouped-query attention with RoPE, RMSNorm, gated MLP. What differs between
the members (biases, norms of queries and keys, windows, tied embeddings, RoPE scaling) is in
LlamaConfig, which is static: the compiled step holds only what the checkpoint uses.
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
from jaxserve.layers.rope import Rope, cos_and_sin
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


@dataclass(frozen=True)
class LlamaConfig:
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
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class _Member:
    """What the architecture name implies; None for a bias: config.json says."""

    qkv_bias: bool | None = False
    attention_out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding: str = "never"  # never | always | layered (Qwen: from max_window_layers on)


_MEMBERS: Mapping[str, _Member] = {
    "LlamaForCausalLM": _Member(qkv_bias=None, attention_out_bias=None, mlp_bias=None),
    "MistralForCausalLM": _Member(sliding="always"),
    "Qwen2ForCausalLM": _Member(qkv_bias=True, sliding="layered"),
    "Qwen3ForCausalLM": _Member(
        qkv_bias=None, attention_out_bias=None, qk_norm=True, head_dim=128, sliding="layered"
    ),
}


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """LlamaConfig of a config.json. Raises ModelLoadError on what cannot be computed exactly."""
    member = _member(config)
    hidden_size = hf_config.positive_int(config, "hidden_size")
    num_layers = hf_config.positive_int(config, "num_hidden_layers", limit=hf_config.MAX_LAYERS)
    num_heads = hf_config.positive_int(config, "num_attention_heads")
    num_kv_heads = hf_config.key_value_heads(config, num_heads)
    head_dim = hf_config.positive_int(
        config, "head_dim", member.head_dim or max(hidden_size // num_heads, 1)
    )
    rope = hf_config.rope(config, head_dim)
    attention_bias = hf_config.flag(config, "attention_bias", False)
    mlp_bias = hf_config.flag(config, "mlp_bias", False)
    return LlamaConfig(
        vocab_size=hf_config.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf_config.positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf_config.usable_context(config, rope),
        rms_norm_eps=hf_config.norm_eps(config),
        activation=hf_config.activation(config, "hidden_act", "silu"),
        rope=rope,
        windows=_windows(config, member, num_layers),
        tied=hf_config.flag(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias if member.qkv_bias is None else member.qkv_bias,
        attention_out_bias=(
            attention_bias if member.attention_out_bias is None else member.attention_out_bias
        ),
        mlp_bias=mlp_bias if member.mlp_bias is None else member.mlp_bias,
        qk_norm=member.qk_norm,
    )


def _member(config: Mapping[str, Any]) -> _Member:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    if not isinstance(name, str) or name not in _MEMBERS:
        raise ModelLoadError(
            f"config: architectures[0] is {str(name)[:60]!r}; "
            f"this model file serves {', '.join(_MEMBERS)}"
        )
    return _MEMBERS[name]


def _windows(config: Mapping[str, Any], member: _Member, num_layers: int) -> tuple[int | None, ...]:
    """Mistral windows every layer unless told null; Qwen only if told to, from a layer on."""
    if member.sliding == "never":
        return (None,) * num_layers
    window = hf_config.sliding_window(config, 4096)
    if member.sliding == "always":
        return (window,) * num_layers
    if not hf_config.flag(config, "use_sliding_window", False) or window is None:
        return (None,) * num_layers
    first = hf_config.non_negative_int(config, "max_window_layers", 28)
    default = ("full_attention",) * min(first, num_layers) + ("sliding_attention",) * num_layers
    kinds = hf_config.layer_types(config, num_layers, default[:num_layers])
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def param_specs(config: LlamaConfig) -> dict[str, Any]:
    """{"embed" [V, E], "layers": [...], "final_norm" [E], "unembed" [V, E] unless tied}."""
    E = config.hidden_size
    specs = {
        "embed": matrix((config.vocab_size, E), ("vocab", "embed")),
        "layers": [_layer_specs(config) for _ in range(config.num_layers)],
        "final_norm": ParamSpec((E,), (None,), "ones"),
    }
    if not config.tied:
        specs["unembed"] = matrix((config.vocab_size, E), ("vocab", "embed"))
    return specs


def _layer_specs(config: LlamaConfig) -> dict[str, ParamSpec]:
    """All matrices are [out, in]. Q, K and V are one matrix in that order, gate and up another."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_heads * D
    qkv_size = q_size + 2 * config.num_kv_heads * D
    specs = {
        "attention_norm": ParamSpec((E,), (None,), "ones"),
        "qkv": matrix((qkv_size, E), ("qkv", "embed")),
        "attention_out": matrix((E, q_size), ("embed", "heads")),
        "mlp_norm": ParamSpec((E,), (None,), "ones"),
        "gate_up": matrix((2 * F, E), ("gate_up", "embed")),
        "down": matrix((E, F), ("embed", "mlp")),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = ParamSpec((qkv_size,), ("qkv",), "zeros")
    if config.attention_out_bias:
        specs["attention_out_bias"] = ParamSpec((E,), (None,), "zeros")
    if config.mlp_bias:
        specs["gate_up_bias"] = ParamSpec((2 * F,), ("gate_up",), "zeros")
        specs["down_bias"] = ParamSpec((E,), (None,), "zeros")
    if config.qk_norm:
        specs["q_norm"] = ParamSpec((D,), (None,), "ones")
        specs["k_norm"] = ParamSpec((D,), (None,), "ones")
    return specs


def weight_names(config: LlamaConfig) -> dict[str, Any]:
    """The tree of param_specs with the checkpoint tensors each parameter is joined from."""
    names = {
        "embed": WeightNames(("model.embed_tokens.weight",)),
        "layers": [_layer_names(config, f"model.layers.{i}.") for i in range(config.num_layers)],
        "final_norm": WeightNames(("model.norm.weight",)),
    }
    if not config.tied:
        names["unembed"] = WeightNames(("lm_head.weight",))
    return names


def _layer_names(config: LlamaConfig, prefix: str) -> dict[str, WeightNames]:
    sources = {
        "attention_norm": ("input_layernorm.weight",),
        "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "attention_out": ("self_attn.o_proj.weight",),
        "attention_out_bias": ("self_attn.o_proj.bias",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "down": ("mlp.down_proj.weight",),
        "down_bias": ("mlp.down_proj.bias",),
    }
    return {
        name: WeightNames(tuple(prefix + source for source in sources[name]))
        for name in _layer_specs(config)
    }


def kv_spec(config: LlamaConfig) -> KVSpec:
    """One group, or two where Qwen mixes layers with and without a window."""
    return group_by_window(config.windows, config.num_kv_heads, config.head_dim)


def forward(
    config: LlamaConfig, params: Params, batch: StepBatch, kv_pool: KVPool, ops: Ops
) -> tuple[jax.Array, Taps, KVPool]:
    """All layers over the step's flat tokens. Returns (hidden [T, E], taps, kv_pool).

    Taps are each layer's input [T, E], under `layer_input(index)`.
    """
    hidden = ops.embed(params["embed"], batch.tokens)
    cos, sin = cos_and_sin(config.rope, batch.positions)
    taps = {}
    for index, layer in enumerate(params["layers"]):
        taps[layer_input(index)] = hidden
        q, k, v = attention_inputs(config, ops, layer, hidden, cos, sin)
        attended, kv_pool = ops.attend(
            index, q, k, v, kv_pool, batch,
            scale=config.head_dim**-0.5, window=config.windows[index],
        )  # fmt: skip
        hidden = attention_output_and_mlp(config, ops, layer, hidden, attended)
    return ops.rms_norm(hidden, params["final_norm"], config.rms_norm_eps), taps, kv_pool


@partial(jax.jit, static_argnums=(0, 1))
def attention_inputs(
    config: LlamaConfig,
    ops: Ops,
    layer: Params,
    hidden: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm, projections and rotation: q [T, H, D] and k, v [T, K, D] of hidden [T, E].

    A jit inside the step: its trace is shared by all layers, which have the same shapes.
    """
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    normed = ops.rms_norm(hidden, layer["attention_norm"], config.rms_norm_eps)
    qkv = ops.linear(normed, layer["qkv"], layer.get("qkv_bias"))
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    if config.qk_norm:
        q = ops.rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = ops.rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v


@partial(jax.jit, static_argnums=(0, 1))
def attention_output_and_mlp(
    config: LlamaConfig, ops: Ops, layer: Params, hidden: jax.Array, attended: jax.Array
) -> jax.Array:
    """The rest of the layer: hidden [T, E] plus attention's output, plus the MLP's."""
    flat = attended.reshape(attended.shape[0], -1)  # [T, H * D]
    hidden = ops.linear(flat, layer["attention_out"], layer.get("attention_out_bias"), hidden)
    normed = ops.rms_norm(hidden, layer["mlp_norm"], config.rms_norm_eps)
    return gated_mlp(
        ops, config.activation, normed, layer["gate_up"], layer["down"],
        layer.get("gate_up_bias"), layer.get("down_bias"), hidden,
    )  # fmt: skip


def unembed(config: LlamaConfig, params: Params, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Logits [S, V] float32 of hidden [S, E]."""
    return logits(ops, hidden, params["embed"] if config.tied else params["unembed"])


MODEL = ModelDef("llama", config_from_hf, param_specs, weight_names, kv_spec, forward, unembed)
