"""Llama-3-8B from its configuration alone: what the GPU scripts compile, check and time."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.loading.describe import DescribedModel, describe_model
from jaxserve.planning.weights import token_work

LLAMA3_8B: dict[str, Any] = {  # its published config.json, as far as it is read here
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WEIGHTS: dict[str, str | None] = {"bf16": None, "int4": "int4", "fp8": "fp8"}
KV_TYPES = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
# Output rows and inputs of the four matrices of a layer.
LINEARS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Work:
    """What one step of a model must do at the least: bytes read, operations done."""

    weight_bytes: int
    kv_bytes: int
    operations: int

    @property
    def read_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The roofline: what takes longer of reading and computing."""
        return max(self.read_bytes / bandwidth, self.operations / rate)


def described(weights: str, layers: int) -> DescribedModel:
    """Shapes of the weights as a Hopper GPU keeps them, in a name of WEIGHTS."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama-3-8b"
        path.mkdir()
        config = path / "config.json"
        config.write_text(json.dumps(LLAMA3_8B | {"num_hidden_layers": layers}))
        return describe_model(
            str(config), dtype="bfloat16", weight_layout="gpu", quantization=WEIGHTS[weights]
        )


def kv_token_bytes(kv: str, layers: int) -> int:
    """Keys and values of one token, with their scales."""
    per_head = 2 * HEAD_DIM if kv == "bf16" else HEAD_DIM + 4
    return layers * 2 * KV_HEADS * per_head


@dataclass(frozen=True)
class Row:
    """A row of a step: its query tokens, and its tokens of KV once they are in."""

    queries: int
    kv_len: int

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        return self.queries * self.kv_len - self.queries * (self.queries - 1) // 2


def step_work(model: DescribedModel, kv: str, rows: Sequence[Row], sampled: int) -> Work:
    """Every weight and every key and value is read once. sampled: tokens whose logits are made."""
    layers = model.config.num_layers
    work = token_work(model.model, model.config)
    weights = sum(
        leaf.size * leaf.dtype.itemsize
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
        if path[0] != jax.tree_util.DictKey("embed")  # of which a few rows are read
    )
    tokens, pairs = sum(row.queries for row in rows), sum(row.pairs for row in rows)
    return Work(
        weight_bytes=weights,
        kv_bytes=kv_token_bytes(kv, layers) * sum(row.kv_len for row in rows),
        operations=tokens * work.layers
        + sampled * work.unembed
        + layers * 4 * HEADS * HEAD_DIM * pairs,
    )
