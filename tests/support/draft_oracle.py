"""Drafts from their papers' formulas, one position at a time in float64, over published tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def eagle(
    config: Mapping[str, Any], tensors: Tensors, embeddings: np.ndarray, features: np.ndarray
) -> np.ndarray:
    """EAGLE's next features [T, E] of one sequence: pairs (embedding, feature) at 0, 1, 2 ..."""
    x = np.concatenate([embeddings, features], axis=1) @ _of(tensors, "fc.weight").T
    x = x + tensors.get("fc.bias", 0.0)
    for layer in range(config["num_hidden_layers"]):
        own = _under(tensors, f"layers.{layer}.")
        inputs = x if layer == 0 else _norm(x, own["input_layernorm.weight"], config)
        x = _layer(config, own, x, inputs)
    return x


def eagle3(
    config: Mapping[str, Any], tensors: Tensors, embeddings: np.ndarray, features: np.ndarray
) -> np.ndarray:
    """EAGLE-3's next features [T, E] of one sequence, from features that are fused already."""
    own = _under(tensors, "midlayer.")
    embedded = _norm(embeddings, own["input_layernorm.weight"], config)
    normed = _norm(features, own["hidden_norm.weight"], config)
    return _layer(config, own, features, np.concatenate([embedded, normed], axis=1))


def eagle3_logits(config: Mapping[str, Any], tensors: Tensors, features: np.ndarray) -> np.ndarray:
    """[T, draft vocabulary]."""
    return _norm(features, _of(tensors, "norm.weight"), config) @ _of(tensors, "lm_head.weight").T


def mtp(
    config: Mapping[str, Any], tensors: Tensors, embeddings: np.ndarray, features: np.ndarray
) -> np.ndarray:
    """DeepSeek-V3's MTP module over a Llama layer: what its shared head's norm gives, [T, E]."""
    normed = [
        _norm(embeddings, tensors["enorm.weight"], config),
        _norm(features, tensors["hnorm.weight"], config),
    ]
    x = np.concatenate(normed, axis=1) @ _of(tensors, "eh_proj.weight").T
    x = _layer(config, tensors, x, _norm(x, tensors["input_layernorm.weight"], config))
    return _norm(x, tensors["shared_head.norm.weight"], config)


def medusa(
    tensors: Tensors, hidden: np.ndarray, heads: int, blocks: int, unembed: np.ndarray | None
) -> np.ndarray:
    """Medusa's logits [heads, S, V] of hidden [S, E]; unembed [V, E]: what all heads share."""
    found = []
    for head in range(heads):
        x = hidden.astype(np.float64)
        for block in range(blocks):
            own = _under(tensors, f"{head}.{block}.linear.")
            y = x @ own["weight"].T + own["bias"]
            x = x + y / (1 + np.exp(-y))
        table = tensors[f"{head}.{blocks}.weight"] if unembed is None else unembed
        found.append(x @ table.astype(np.float64).T)
    return np.stack(found)


def _layer(
    config: Mapping[str, Any], own: Tensors, residual: np.ndarray, inputs: np.ndarray
) -> np.ndarray:
    H, K, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, k, v = (
        (inputs @ own[f"self_attn.{part}_proj.weight"].astype(np.float64).T
         + own.get(f"self_attn.{part}_proj.bias", 0.0)).reshape(len(inputs), -1, D)
        for part in "qkv"
    )  # fmt: skip
    q, k = _rotate(q, config), _rotate(k, config)
    out = np.zeros_like(q)
    for t in range(len(inputs)):
        for head in range(H):
            scores = k[: t + 1, head * K // H] @ q[t, head] / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ v[: t + 1, head * K // H]
    x = residual + out.reshape(len(inputs), -1) @ own["self_attn.o_proj.weight"].T
    normed = _norm(x, own["post_attention_layernorm.weight"], config)
    gate, up = (normed @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T


def _rotate(x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    D = x.shape[-1]
    angles = np.arange(len(x))[:, None] * config["rope_theta"] ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    scale = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    return x / scale * weight


def _of(tensors: Tensors, name: str) -> np.ndarray:
    return tensors[name].astype(np.float64)


def _under(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): values.astype(np.float64)
        for name, values in tensors.items()
        if name.startswith(prefix)
    }
