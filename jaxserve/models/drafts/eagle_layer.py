"""What EAGLE's drafts share: their config.json, and a Llama layer with another way in."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.ops import Ops
from jaxserve.errors import ModelLoadError
from jaxserve.models import hf_config, llama
from jaxserve.models.base import Params, ParamSpec, WeightNames, matrix
from jaxserve.models.drafts.base import TargetSizes

_PARTS = {
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "attention_out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


def layer_config(config: Mapping[str, Any], target: TargetSizes) -> llama.LlamaConfig:
    """The layers' sizes. EAGLE's config.json is a Llama's, whatever family the target is of.

    Raises ModelLoadError if the draft is of another vocabulary or, for its token embeddings are the
    target's, of another width.
    """
    as_llama = {**config, "architectures": ["LlamaForCausalLM"], "attention_bias": False}
    layer = llama.config_from_hf(as_llama | {"mlp_bias": False})
    for name in ("hidden_size", "vocab_size"):
        got, want = getattr(layer, name), getattr(target, name)
        if got != want:
            raise ModelLoadError(
                f"config: {name} of the draft is {got}, the target's is {want}; take a draft that "
                "was trained for this target"
            )
    return layer


def qkv_bias(config: Mapping[str, Any]) -> bool:
    """EAGLE's own key, or the one of Llama's config.json."""
    default = hf_config.flag(config, "attention_bias", False)
    return hf_config.flag(config, "qkv_bias", default)


def layer_specs(config: llama.LlamaConfig, input_size: int) -> dict[str, ParamSpec]:
    """Attention over inputs of input_size and an MLP, matrices [out, in]. Norms of the inputs are
    the draft's own matter."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * D
    specs = {
        "qkv": matrix((qkv_size, input_size), ("qkv", "embed")),
        "attention_out": matrix((E, config.num_heads * D), ("embed", "heads")),
        "mlp_norm": ParamSpec((E,), (None,), "ones"),
        "gate_up": matrix((2 * F, E), ("gate_up", "embed")),
        "down": matrix((E, F), ("embed", "mlp")),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = ParamSpec((qkv_size,), ("qkv",), "zeros")
    return specs


def layer_names(config: llama.LlamaConfig, prefix: str) -> dict[str, WeightNames]:
    """The checkpoint tensors of `layer_specs`."""
    return {
        name: WeightNames(tuple(prefix + part for part in _PARTS[name]))
        for name in layer_specs(config, config.hidden_size)
    }


@partial(jax.jit, static_argnums=(0, 1))
def queries_keys_values(
    config: llama.LlamaConfig,
    ops: Ops,
    layer: Params,
    inputs: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D] and k, v [T, K, D] of inputs [T, N], q and k rotated."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = ops.linear(inputs, layer["qkv"], layer.get("qkv_bias"))
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v
