"""Random weights that are the same, bit for bit, on every machine and in every environment.

Tests and scripts/make_goldens draw a checkpoint from a seed instead of storing it; the two run
under different numpy versions and only the latter has torch. So this file imports numpy alone,
uses only what numpy promises to keep (the PCG64 bit stream), and only exact arithmetic.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.1


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, norm_center: float = 1.0
) -> dict[str, np.ndarray]:
    """A float32 array for every checkpoint tensor name.

    Matrices get standard deviation 1 / sqrt(last axis), so activations keep their size and
    attention is far from uniform at any width; norm weights lie around norm_center (0 for Gemma,
    whose norms store the distance from 1). A tensor depends on seed and its own name alone.
    """
    return {name: _random_tensor(name, shape, seed, norm_center) for name, shape in shapes.items()}


def _random_tensor(name: str, shape: tuple[int, ...], seed: int, norm_center: float) -> np.ndarray:
    noise = standard_noise(f"{seed}:{name}", shape)
    if name.endswith("norm.weight"):
        return np.float32(norm_center) + np.float32(NORM_SPREAD) * noise
    if len(shape) < 2:
        return np.float32(BIAS_SPREAD) * noise
    return np.float32(1 / np.sqrt(shape[-1])) * noise


def standard_noise(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bell-shaped float32 noise of mean 0 and deviation 1: four uniform 16-bit words, summed."""
    digest = hashlib.sha256(key.encode()).digest()
    bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))
    words = bits.random_raw(int(np.prod(shape))).astype("<u8", copy=False).view("<u2")
    centered = np.full(words.size // 4, -2 * 65535, np.int32)  # exact integers throughout
    for word in range(4):
        centered += words[word::4]
    deviation = 65536 / np.sqrt(3)  # of four words: sqrt(4 * 65536**2 / 12)
    return (centered / deviation).astype(np.float32).reshape(shape)
