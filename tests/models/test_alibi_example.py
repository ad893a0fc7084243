"""The ALiBi example against its paper's formula, dense and in float64."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.user_file import import_model_file
from tests.support.paged_model import PagedModel, random_params

EXAMPLE = import_model_file(Path(__file__).resolve().parents[2] / "examples" / "alibi_attention.py")


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _attention(config: Any, x: np.ndarray, qkv: np.ndarray) -> np.ndarray:
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    heads = (x @ qkv.T).reshape(len(x), H + 2 * K, D)
    q, k, v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
    k, v = np.repeat(k, H // K, axis=1), np.repeat(v, H // K, axis=1)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
    slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(D) - slopes[:, None, None] * distance
    scores = np.where(distance >= 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)


def test_logits_are_the_formula() -> None:
    config = EXAMPLE.config_from_hf(EXAMPLE.TEST_CONFIG)
    params = random_params(EXAMPLE.MODEL, config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 30)
    x = params["embed"][tokens].astype(float)
    for layer in params["layers"]:
        normed = _norm(x, layer["attention_norm"], config.rms_norm_eps)
        x = x + _attention(config, normed, layer["qkv"]) @ layer["attention_out"].T
        gate, up = np.split(_norm(x, layer["mlp_norm"], 1e-6) @ layer["gate_up"].T, 2, axis=-1)
        x = x + gate / (1 + np.exp(-gate)) * up @ layer["down"].T
    want = _norm(x, params["final_norm"], config.rms_norm_eps) @ params["unembed"].T
    got = PagedModel(EXAMPLE.MODEL, config, params).whole(tokens.tolist())
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)
