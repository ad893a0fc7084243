"""Whether two processes serve the same model: what a saved request remembers of its own.

Hashing every weight would mean to fetch a large model back from the device. So they are told apart
by a sample: two rows of every array, one from its middle and its last one. Training changes all
rows of a matrix, so a fine-tuned or another checkpoint of the same shape differs in it. It is no
proof against somebody who changes other numbers on purpose.

The same checkpoint kept in another type or packing (float32 and bfloat16, int4, another backend's
layout) has other arrays. Those samples cannot be compared, and `compare` says so.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAMPLE = 64  # numbers of a row


@dataclass(frozen=True)
class ModelIdentity:
    """architecture: its name; config: digest of the configuration and the vocabulary's size;
    storage: digest of all arrays' names, shapes and types; weights: digest of the sample."""

    architecture: str
    config: str
    storage: str
    weights: str

    def compare(self, other: "ModelIdentity") -> Literal["same", "other", "stored differently"]:
        """Whether `other` is this model; "stored differently": as far as can be told, it is."""
        if (self.architecture, self.config) != (other.architecture, other.config):
            return "other"
        if self.storage != other.storage:
            return "stored differently"
        return "same" if self.weights == other.weights else "other"


def model_identity(architecture: str, config: Any, vocab_size: int, params: Any) -> ModelIdentity:
    """The identity of a model whose weights are `params`, as the device holds them."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    storage, weights = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        storage.update(f"{name} {leaf.shape} {leaf.dtype};".encode())
        for row in _sample_rows(leaf):
            weights.update(row.tobytes())
    # A configuration of a user's own model may show where its parts are in memory.
    shown = _ADDRESS.sub("", repr((config, vocab_size)))
    return ModelIdentity(
        architecture,
        hashlib.blake2b(shown.encode(), digest_size=16).hexdigest(),
        storage.hexdigest(),
        weights.hexdigest(),
    )


def _sample_rows(leaf: jax.Array) -> list[np.ndarray]:
    if leaf.size == 0:
        return []
    on_host = all(device.platform == "cpu" for device in leaf.devices())
    # A view there; elsewhere only the rows are fetched, with a small program for each shape.
    array: Any = np.asarray(leaf) if on_host else leaf
    places: list[Callable[[int], int]] = [lambda size: size // 2, lambda size: size - 1]
    rows = [array[tuple(place(size) for size in leaf.shape[:-1])] for place in places]
    return [np.asarray(jax.device_get(row)).reshape(-1)[:_SAMPLE] for row in rows]
