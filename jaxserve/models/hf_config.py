"""Reading config.json with checks: every value a model relies on is present, typed and bounded."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.layers.rope import Rope
from jaxserve.layers.rope_scaling import make_rope
from pallas_kernels.gated_activation import ACTIVATIONS

HFConfig = Mapping[str, Any]

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24  # of any dimension, vocabulary and context included


def positive_int(
    config: HFConfig, key: str, default: int | None = None, limit: int = MAX_SIZE
) -> int:
    """config[key]; the default if absent or null. ModelLoadError unless an int in [1, limit]."""
    return _bounded_int(config, key, default, 1, limit)


def non_negative_int(config: HFConfig, key: str, default: int) -> int:
    """config[key]; the default if absent or null. ModelLoadError unless an int in [0, MAX_SIZE]."""
    return _bounded_int(config, key, default, 0, MAX_SIZE)


def _bounded_int(config: HFConfig, key: str, default: int | None, low: int, high: int) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelLoadError(
            f"config: {key} is {str(value)[:40]}; want a whole number {low} to {high}"
        )
    return value


def key_value_heads(config: HFConfig, num_heads: int) -> int:
    """num_key_value_heads (absent: one for each query head), checked to divide num_heads."""
    number = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % number:
        raise ModelLoadError(
            f"config: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {number}"
        )
    return number


def positive_float(config: HFConfig, key: str, default: float | None = None) -> float | None:
    """config[key] as float; None only if it is absent or null and so is the default."""
    value: Any = config.get(key)
    if value is None:
        return default
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not 0 < value < float("inf"):
        raise ModelLoadError(f"config: {key} is {str(value)[:40]}; want a number above 0")
    return float(value)


def norm_eps(config: HFConfig) -> float:
    """rms_norm_eps; the published default is 1e-6."""
    value = positive_float(config, "rms_norm_eps", 1e-6)
    assert value is not None
    return value


def flag(config: HFConfig, key: str, default: bool) -> bool:
    """config[key] as bool; the default if absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"config: {key} is {str(value)[:40]}; want true or false")
    return value


def activation(config: HFConfig, key: str, default: str) -> str:
    """config[key], checked to be an activation that `layers.mlp` has."""
    name = config.get(key)
    if name is None:
        name = default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelLoadError(
            f"config: {key} is {str(name)[:40]!r}; known are {', '.join(ACTIVATIONS)}"
        )
    return name


def layer_types(config: HFConfig, num_layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of each layer: full_attention or sliding_attention."""
    value = config.get("layer_types")
    if value is None:
        return default
    known = ("full_attention", "sliding_attention")
    if not isinstance(value, list | tuple) or len(value) != num_layers:
        raise ModelLoadError(f"config: layer_types wants a list of {num_layers} names, one a layer")
    for layer, kind in enumerate(value):
        if kind not in known:
            raise ModelLoadError(
                f"config: layer_types[{layer}] is {str(kind)[:40]!r}; known are {', '.join(known)}"
            )
    return tuple(value)


def sliding_window(config: HFConfig, default: int) -> int | None:
    """sliding_window: absent means the family's default, an explicit null means none."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return positive_int(config, "sliding_window", default)


def rope(config: HFConfig, head_dim: int) -> Rope:
    """The rotation of a model that has one kind of it.

    Older files hold rope_theta beside a rope_scaling object or null, newer ones all of it in
    rope_parameters. A trained length given beside them stands above the one inside (Phi's habit).
    """
    merged = nested(config, "rope_scaling") or nested(config, "rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        merged.setdefault(key, config.get(key))
    if config.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return make_rope(merged, head_dim, positive_int(config, "max_position_embeddings"))


def usable_context(config: HFConfig, rope: Rope) -> int:
    """Tokens a request may span: dynamic scaling stretches what the file calls the maximum."""
    length = positive_int(config, "max_position_embeddings")
    return length if rope.dynamic is None else int(length * rope.dynamic.factor)


def nested(config: HFConfig, key: str) -> dict[str, Any]:
    """A copy of the object config[key]; empty if absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"config: {key} is {type(value).__name__}; want an object or null")
    return dict(value)
