"""Checkpoints of a few thousand weights, as Hugging Face publishes them: config and tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.loading.random_init import random_tensors

# Sizes that the 32-element blocks of quantised types divide, and a vocabulary wider than a byte.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a plain Llama checkpoint of this configuration."""
    E, F, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], E)}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (E,),
            "self_attn.q_proj": (H * D, E),
            "self_attn.k_proj": (K * D, E),
            "self_attn.v_proj": (K * D, E),
            "self_attn.o_proj": (E, H * D),
            "post_attention_layernorm": (E,),
            "mlp.gate_proj": (F, E),
            "mlp.up_proj": (F, E),
            "mlp.down_proj": (E, F),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": of_layer[name] for name in of_layer}
    shapes["model.norm.weight"] = (E,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], E)
    return shapes


def tiny_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for `tiny_shapes`."""
    return random_tensors(tiny_shapes(config), seed)
