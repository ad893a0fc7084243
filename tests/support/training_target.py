"""A tiny target in a folder, whose answers follow a pattern that a draft can learn in seconds."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from tests.support.tiny_checkpoints import LLAMA, tiny_tensors
from tests.support.toy_vocabularies import train_byte_level

LAYERS = 6
CONFIG: dict[str, Any] = LLAMA | {
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
SENTENCES = (
    "The ship left the harbour before the sun had risen over the hills.",
    "Nobody had seen the letter that lay under the door for nine days.",
    "A careful person measures twice, in two different ways, and cuts once.",
    "When the rain stopped, the children ran down to the river again.",
)


@cache
def _tokenizer_json() -> str:
    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), vocab_size=272)
    text: str = backend.to_str()
    return text


def write_target(folder: Path, **config: Any) -> Path:
    """config.json, weights and a tokenizer of 272 ids. The last token alone decides most of what
    comes next, sharply: the layers are damped, and the unembedding maps word i to word 7 i + 3."""
    whole = CONFIG | config
    tensors = tiny_tensors(whole)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * np.float32(0.1)
    V = whole["vocab_size"]
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = np.zeros_like(embed)
    tensors["lm_head.weight"][(7 * np.arange(V) + 3) % V] = 6 * embed
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    roles = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


def write_text(path: Path, documents: int = 60) -> Path:
    """Documents of a few sentences in changing order, separated by form feeds."""
    rng = np.random.default_rng(0)
    parts = [" ".join(rng.permutation(SENTENCES)[:3]) for _ in range(documents)]
    path.write_text("\f".join(parts))
    return path
