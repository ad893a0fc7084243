"""What the sampler should do, in float64 and by sorting: slow, plain, and written separately."""

import math
from typing import Any

import numpy as np

_MASK = 0xFFFFFFFF


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Threefry-2x32-20 on Python integers or uint64 arrays."""
    words = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + words[0]) & _MASK, (counter[1] + words[1]) & _MASK
    for number in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        a = (a + b) & _MASK
        b = ((b << turn) | (b >> (32 - turn))) & _MASK
        b ^= a
        if number % 4 == 3:
            step = number // 4 + 1
            a = (a + words[step % 3]) & _MASK
            b = (b + words[(step + 1) % 3] + step) & _MASK
    return a, b


def noise(seed: int, choice: int, position: int, vocab: int) -> np.ndarray:
    """Gumbel noise of every token [vocab], float64."""
    key = threefry((seed & _MASK, seed >> 32 & _MASK), (choice, position))
    bits, _ = threefry(key, (np.arange(vocab, dtype=np.uint64), 0))
    uniform = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def kept(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """Mask [V] of the tokens that may be drawn, ties at every threshold included."""
    return kept_with_margin(logits, **settings)[0]


def kept_with_margin(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[np.ndarray, float]:
    """The mask, and how far min_p and top_p are from deciding otherwise: below 1e-4 float32 may."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    mask = scaled > -np.inf
    margin = 1.0
    if 0 < top_k < len(logits):
        mask &= logits >= np.sort(logits)[::-1][top_k - 1]
    if min_p > 0:
        mask &= scaled >= math.log(min_p)
        margin = np.abs(scaled - math.log(min_p)).min() if min_p < 1 else 1.0
    if top_p < 1:
        weights = np.where(mask, np.exp(scaled), 0)
        share = weights / weights.sum()
        above = np.array([share[logits > one].sum() for one in logits])
        margin = min(margin, np.abs(above - top_p)[above > 0].min(initial=1.0))
        mask &= (above < top_p) | (above == 0)
    return mask, float(margin)


def token(
    logits: np.ndarray, seed: int, choice: int, position: int, **settings: Any
) -> tuple[int, float]:
    """The token that must be drawn, and the margin by which (rounding may decide below 1e-4)."""
    mask, margin = kept_with_margin(logits, **settings)
    scaled = (logits.astype(np.float64) - logits.max()) / settings.get("temperature", 1.0)
    scores = np.where(mask, scaled + noise(seed, choice, position, len(logits)), -np.inf)
    first, second = np.argsort(-scores, kind="stable")[:2]
    return int(first), float(min(margin, scores[first] - scores[second]))
