"""From a checkpoint's RoPE parameters to frequencies: host side, float64, once per model.

Each rule is the one transformers applies, because that is what checkpoints are published with.
A rule that is not known here is refused: guessing one gives fluent nonsense past some length.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.layers.rope import DynamicScaling, Rope

Parameters = Mapping[str, Any]
LARGEST_PARAMETER = 1e15  # any real base, factor or length is far below; rules out inf and NaN
Rule = Callable[[Parameters, np.ndarray, int], Rope]


def make_rope(parameters: Parameters, head_dim: int, max_position_embeddings: int) -> Rope:
    """The rotation that `parameters` describe.

    parameters: rope_type (or the older key type; absent: default), rope_theta, and what the type
    needs. `{"rope_type": "factors", "factors": [...]}` holds a divisor per pair, as a GGUF's
    rope_freqs.weight does. max_position_embeddings: of the checkpoint; for `dynamic` the length
    it was trained on. Raises ModelLoadError on an unknown type or a value out of range.
    """
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    rule = _RULES.get(rope_type) if isinstance(rope_type, str) else None
    if rule is None:
        raise ModelLoadError(
            f"rope_type is {str(rope_type)[:40]!r}; known are {', '.join(_RULES)}. "
            "The model cannot be computed exactly without it"
        )
    if head_dim < 4 or head_dim % 2:
        raise ModelLoadError(f"head_dim is {head_dim}; RoPE wants an even number of at least 4")
    if _number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(
            f"partial_rotary_factor is {parameters['partial_rotary_factor']!r}; "
            "this family rotates whole heads, so only 1.0 can be served"
        )
    base = _number(parameters, "rope_theta", 10000.0)
    inv_freq = base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return rule(parameters, inv_freq, max_position_embeddings)


def _default(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:  # noqa: ARG001
    return _rope(inv_freq)


def _linear(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:  # noqa: ARG001
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return _rope(inv_freq / _number(parameters, "factor"))


def _dynamic(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:
    factor = _number(parameters, "factor")
    return _rope(inv_freq, dynamic=DynamicScaling(factor, max_position))


def _factors(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:  # noqa: ARG001
    try:
        factors = np.asarray(parameters.get("factors"), np.float64)
    except (TypeError, ValueError):
        factors = np.empty(0)
    if factors.shape != inv_freq.shape:
        raise ModelLoadError(
            f"rope factors have shape {factors.shape}; want one divisor for each of the "
            f"{inv_freq.shape[0]} pairs of a head"
        )
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelLoadError("rope factors are divisors: all must be finite and above 0")
    return _rope(inv_freq / factors)


def _llama3(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a ramp between."""
    factor = _number(parameters, "factor")
    low = _number(parameters, "low_freq_factor")
    high = _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings", max_position)
    if high <= low:
        raise ModelLoadError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    turns = original * inv_freq / (2 * math.pi)  # turns a pair makes in the trained context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _rope((1 - kept) * inv_freq / factor + kept * inv_freq)


def _yarn(parameters: Parameters, inv_freq: np.ndarray, max_position: int) -> Rope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over pair indices, and scaled scores."""
    original = _number(parameters, "original_max_position_embeddings", max_position)
    factor = _number(parameters, "factor", max_position / original)
    base = _number(parameters, "rope_theta", 10000.0)
    head_dim = 2 * inv_freq.shape[0]

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = pair_that_turns(_number(parameters, "beta_fast", 32.0))
    last = pair_that_turns(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    interpolated = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
    frequencies = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)
    return _rope(frequencies, attention_scaling=_yarn_attention_scaling(parameters, factor))


def _yarn_attention_scaling(parameters: Parameters, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        over_all = scale(_number(parameters, "mscale_all_dim"))
        return scale(_number(parameters, "mscale")) / over_all
    return scale(1.0)


_RULES: dict[str, Rule] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "factors": _factors,
}


def _rope(
    inv_freq: np.ndarray, attention_scaling: float = 1.0, dynamic: DynamicScaling | None = None
) -> Rope:
    return Rope(tuple(inv_freq.tolist()), attention_scaling, dynamic)


def _number(parameters: Parameters, key: str, default: float | None = None) -> float:
    """A positive finite number; None counts as absent, since configs spell it out as null."""
    value: Any = parameters.get(key)
    if value is None:
        value = default
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not 0 < value < LARGEST_PARAMETER:
        raise ModelLoadError(f"RoPE parameter {key} is {str(value)[:40]}; want a number above 0")
    return float(value)
