"""The contract of drafts that go on token by token from features of the target.

A draft reads, for the token at position i + 1, that token's embedding (of the target's own table)
and a feature of position i, and gives a feature of position i + 1, from which come logits for
position i + 2. The features of known positions are the target's; those of drafted ones are the
draft's own last output. The pair is rotated, cached and attended to as position i.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import Config, Params

Unembed = Callable[[jax.Array], jax.Array]  # the target's: hidden [S, E] -> logits [S, V] float32


@dataclass(frozen=True)
class TargetSizes:
    """What a draft must fit: the target's width, depth and vocabulary (rows of its logits)."""

    hidden_size: int
    num_layers: int
    vocab_size: int


def target_sizes(config: Config) -> TargetSizes:
    """Of a family's config. Raises ModelLoadError for one that does not say."""
    sizes = {}
    for name in ("hidden_size", "num_layers", "vocab_size"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"target: config.{name} is {value!r}; a draft wants a target whose config has it"
            )
        sizes[name] = value
    return TargetSizes(**sizes)


@dataclass(frozen=True)
class DraftTensors:
    """What reading a draft's checkpoint needs, for one that is no FeatureDraft: a ParameterTree."""

    name: str
    param_specs: Callable[[Config], Any]
    weight_names: Callable[[Config], Any]


@dataclass(frozen=True)
class FeatureDraft:
    """A kind of draft. All fields are static; equal drafts share programs.

    config_from_hf(dict of config.json, target) -> Config; raises ModelLoadError.
    param_specs(config), weight_names(config): as in ModelDef. kv_spec(config) -> KVSpec.
    tap_names(config): the target's taps that `fuse` wants, joined on the last axis; none: it wants
        the target's last hidden states, as forward returns them.
    fuse(config, params, captured [T, N], ops) -> features [T, E] of known positions.
    forward(config, params, embeddings [T, E], features [T, E], batch, kv_pool, ops)
        -> (features [T, E], kv_pool): one step over flat tokens, as a model's.
    logits(config, params, features [S, E], unembed, ops) -> float32 [S, draft vocabulary].
    target_ids(config, params, ids) -> the ids that the draft's own ids stand for, int32.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any], TargetSizes], Config]
    param_specs: Callable[[Config], Any]
    weight_names: Callable[[Config], Any]
    kv_spec: Callable[[Config], KVSpec]
    tap_names: Callable[[Config], tuple[str, ...]]
    fuse: Callable[[Config, Params, jax.Array, Ops], jax.Array]
    forward: Callable[
        [Config, Params, jax.Array, jax.Array, StepBatch, KVPool, Ops], tuple[jax.Array, KVPool]
    ]
    logits: Callable[[Config, Params, jax.Array, Unembed, Ops], jax.Array]
    target_ids: Callable[[Config, Params, jax.Array], jax.Array]
