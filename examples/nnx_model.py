"""A model written as a `flax.nnx` module, served as it is.

The module is called with the flat tokens of many requests; `attend` keeps them apart. There is no
cache to pass around and no mask to build: `attend(layer, q, k, v, scale=...)` is causal attention
over everything the token's own request has seen.

    jaxserve serve my_checkpoint --model-file examples/nnx_model.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.models.base import ModelDef
from jaxserve.models.nnx import ModuleAttend, from_nnx


@dataclass(frozen=True)
class Config:
    vocab_size: int
    max_position_embeddings: int
    width: int
    num_layers: int
    num_heads: int


def config_from_hf(config: Mapping[str, Any]) -> Config:
    return Config(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
    )


class Layer(nnx.Module):
    """GPT-2's layer: attention and MLP, each normed before and added to the stream."""

    def __init__(self, config: Config, index: int, rngs: nnx.Rngs) -> None:
        width = config.width
        self.index, self.num_heads = index, config.num_heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, hidden: jax.Array, attend: ModuleAttend) -> jax.Array:
        heads = self.qkv(self.attention_norm(hidden)).reshape(len(hidden), 3, self.num_heads, -1)
        q, k, v = heads[:, 0], heads[:, 1], heads[:, 2]  # each [T, heads, head_dim]
        attended = attend(self.index, q, k, v, scale=q.shape[-1] ** -0.5)
        hidden = hidden + self.out(attended.reshape(hidden.shape))
        return hidden + self.down(nnx.gelu(self.up(self.mlp_norm(hidden))))


class Decoder(nnx.Module):
    """Learned positions, layers, a final norm, and the embedding again as the output."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, config.width, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, rngs) for i in range(config.num_layers)])
        self.final_norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: ModuleAttend) -> jax.Array:
        hidden = self.embed(tokens) + self.positions(positions)  # [T, E]
        for layer in self.layers:
            hidden = layer(hidden, attend)
        return self.final_norm(hidden)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        return self.embed.attend(hidden)


def kv_spec(config: Config) -> KVSpec:
    head_dim = config.width // config.num_heads
    layers = tuple(range(config.num_layers))
    return KVSpec((KVGroup("global", layers, config.num_heads, head_dim),))


MODEL: ModelDef = from_nnx(
    "nnx_decoder", config_from_hf=config_from_hf, build=Decoder, kv_spec=kv_spec
)

# A small config.json for the contract test: pytest tests/models --model-file <this file>
TEST_CONFIG = {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
