"""The model contract: a model is a configuration, parameter specs and pure functions.

A model file ends in `MODEL = ModelDef(...)`; see docs/models.md and examples/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch

Config = Any  # the family's own frozen (hashable) dataclass
Params = Any  # nested dicts and lists of arrays, shaped like param_specs(config)
Taps = Mapping[str, jax.Array]  # named activations for researchers and draft heads; may be empty


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: what a checkpoint must hold and how to draw it at random.

    axes: a name per dimension ("vocab", "embed", "heads", "kv_heads", "mlp", ...; None:
    never sharded). init: "normal" (std 0.02), "zeros" or "ones".
    dtype None means the engine's dtype; a numpy dtype name pins it.
    packable: a matrix [out, in] that the model touches only through ops.linear and ops.embed, so
    that it may be handed over packed (QuantizedArray, StackedRows) instead of as a plain array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    dtype: str | None = None
    packable: bool = False

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.shape)} dimensions {self.shape} but axes {self.axes}")
        if self.init not in ("normal", "zeros", "ones"):
            raise ValueError(f"init is {self.init!r}; choose normal, zeros or ones")
        if self.packable and len(self.shape) != 2:
            raise ValueError(f"only matrices can be packable, got the shape {self.shape}")


def matrix(shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    """The spec of a weight matrix [out, in] that may be kept packed."""
    return ParamSpec(shape, axes, packable=True)


@dataclass(frozen=True)
class WeightNames:
    """Where a parameter comes from: checkpoint tensors (Hugging Face names), joined on axis 0."""

    names: tuple[str, ...]


def layer_input(index: int) -> str:
    """The tap that holds the hidden states [T, E] a layer was given (EAGLE-3 drafts read some)."""
    return f"layer_input.{index}"


class ParameterTree(Protocol):
    """What reading a checkpoint needs to know: a ModelDef, or a draft (models/drafts/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def param_specs(self) -> Callable[[Config], Any]: ...

    @property
    def weight_names(self) -> Callable[[Config], Any]: ...


ForwardFn = Callable[[Config, Params, StepBatch, KVPool, Ops], tuple[jax.Array, Taps, KVPool]]
UnembedFn = Callable[[Config, Params, jax.Array, Ops], jax.Array]


@dataclass(frozen=True)
class ModelDef:
    """Everything the engine needs to serve an architecture.

    config_from_hf(dict of config.json) -> Config, with attributes `vocab_size` (rows of the
        unembedding) and `max_position_embeddings`; raises ModelLoadError on what it cannot do
        exactly (an unknown rope type, say).
    param_specs(config) -> tree of ParamSpec; weight_names(config) -> the same tree of WeightNames.
    kv_spec(config) -> KVSpec.
    forward(config, params, batch, kv_pool, ops) -> (hidden [T, E], taps, kv_pool)
    unembed(config, params, hidden [S, E], ops) -> logits [S, vocab_size] float32
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any]], Config]
    param_specs: Callable[[Config], Any]
    weight_names: Callable[[Config], Any]
    kv_spec: Callable[[Config], KVSpec]
    forward: ForwardFn
    unembed: UnembedFn
