"""Draft folders of a few thousand weights in their published layouts, for a tiny target."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.loading.random_init import random_tensors
from jaxserve.models.drafts.base import TargetSizes

TARGET = TargetSizes(hidden_size=32, num_layers=6, vocab_size=96)
LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "vocab_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
DRAFT_VOCABULARY = 40
HEADS, BLOCKS = 3, 2


def layer_shapes(input_size: int = 32, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Of a Llama layer whose attention reads `input_size` numbers."""
    E, F = LAYER["hidden_size"], LAYER["intermediate_size"]
    Q, K = (
        LAYER[key] * LAYER["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (Q, input_size),
        "self_attn.k_proj.weight": (K, input_size),
        "self_attn.v_proj.weight": (K, input_size),
        "self_attn.o_proj.weight": (E, Q),
        "post_attention_layernorm.weight": (E,),
        "mlp.gate_proj.weight": (F, E),
        "mlp.up_proj.weight": (F, E),
        "mlp.down_proj.weight": (E, F),
    }
    if bias:
        rows = {"q": Q, "k": K, "v": K}
        shapes |= {f"self_attn.{part}_proj.bias": (rows[part],) for part in "qkv"}
    return shapes


def eagle_tensors(layers: int = 1, *, fc_bias: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """EAGLE; layers after the first have a norm in front."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 64)}
    if fc_bias:
        shapes["fc.bias"] = (32,)
    for layer in range(layers):
        own = layer_shapes() | ({"input_layernorm.weight": (32,)} if layer else {})
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return random_tensors(shapes, seed)


def eagle3_tensors(*, taps: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """EAGLE-3 that can say every other word and the last ones."""
    own = layer_shapes(64) | {"hidden_norm.weight": (32,), "input_layernorm.weight": (32,)}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (32, taps * 32),
        "norm.weight": (32,),
        "lm_head.weight": (DRAFT_VOCABULARY, 32),
        **{f"midlayer.{name}": shape for name, shape in own.items()},
    }
    words = draft_words()
    present = np.isin(np.arange(TARGET.vocab_size), words)
    return random_tensors(shapes, seed) | {
        "d2t": words - np.arange(DRAFT_VOCABULARY),
        "t2d": present,
    }


def draft_words() -> np.ndarray:
    """The target's ids that the EAGLE-3 draft can say."""
    return np.concatenate([np.arange(0, 60, 2), np.arange(86, 96)])


def medusa_tensors(*, unembed: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Medusa with unembeddings of its own, or without."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            shapes |= {f"{head}.{block}.linear.weight": (32, 32)}
            shapes |= {f"{head}.{block}.linear.bias": (32,)}
        if unembed:
            shapes |= {f"{head}.{BLOCKS}.weight": (TARGET.vocab_size, 32)}
    return random_tensors(shapes, seed)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
