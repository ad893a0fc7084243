"""A new attention variant in one file: a Llama that knows positions by ALiBi instead of RoPE.

ALiBi (Press et al. 2022, arXiv:2108.12409) adds -slope * (i - j) to the score of query i and key
j, with a slope per head. Softmax does not see what is constant over j, so the bias may as well be
slope * j, and that is one more product of the dot: a key gets a last entry that holds its
position, a query one that holds its head's slope. Paged attention needs no change; the head is
one entry wider, and so is the KV cache.

    jaxserve serve my_checkpoint --model-file examples/alibi_attention.py
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.models import llama
from jaxserve.models.base import ModelDef, Params, Taps

Config = llama.LlamaConfig


def config_from_hf(config: Mapping[str, Any]) -> Config:
    """Llama's config.json; its RoPE entries are read but not used."""
    return llama.config_from_hf({**config, "architectures": ["LlamaForCausalLM"]})


def slopes(num_heads: int) -> np.ndarray:
    """Head h of n falls off with 2 ** (-8 (h + 1) / n), float32 [n]."""
    return np.exp2(-8.0 * np.arange(1, num_heads + 1) / num_heads).astype(np.float32)


def kv_spec(config: Config) -> KVSpec:
    layers = tuple(range(config.num_layers))
    return KVSpec((KVGroup("global", layers, config.num_kv_heads, config.head_dim + 1),))


def forward(
    config: Config, params: Params, batch: StepBatch, kv_pool: KVPool, ops: Ops
) -> tuple[jax.Array, Taps, KVPool]:
    hidden = params["embed"][jnp.asarray(batch.tokens)]  # [T, E]
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    scale = D**-0.5
    for index, layer in enumerate(params["layers"]):
        normed = ops.rms_norm(hidden, layer["attention_norm"], config.rms_norm_eps)
        qkv = ops.linear(normed, layer["qkv"], layer.get("qkv_bias"))
        q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
        position = jnp.asarray(batch.positions).astype(k.dtype)[:, None]  # [T, 1]
        q = append(q, jnp.asarray(slopes(H) / scale, q.dtype)[None, :])
        k = append(k, position)
        v = append(v, jnp.zeros_like(position))
        attended, kv_pool = ops.attend(index, q, k, v, kv_pool, batch, scale=scale)
        hidden = llama.attention_output_and_mlp(config, ops, layer, hidden, attended[..., :D])
    return ops.rms_norm(hidden, params["final_norm"], config.rms_norm_eps), {}, kv_pool


def append(x: jax.Array, entry: jax.Array) -> jax.Array:
    """x [T, heads, D] with one more entry a head: [T, heads, D + 1]."""
    column = jnp.broadcast_to(entry, x.shape[:2])[..., None]
    return jnp.concatenate([x, column], axis=-1)


MODEL = ModelDef(
    name="alibi_llama",
    config_from_hf=config_from_hf,
    param_specs=llama.param_specs,
    weight_names=llama.weight_names,
    kv_spec=kv_spec,
    forward=forward,
    unembed=llama.unembed,
)

# A small config.json for the contract test: pytest tests/models --model-file <this file>
TEST_CONFIG = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
