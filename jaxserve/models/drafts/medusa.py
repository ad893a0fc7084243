"""Medusa (Cai et al. 2024, arXiv:2401.10774): heads that each guess one token further ahead.

Head h reads the target's last hidden state at position t, runs it through residual blocks
x + silu(W x + b), and its logits are for token t + 2 + h (token t + 1 is the target's own guess).
Every head has an unembedding of its own, or all share the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.ops import Ops
from jaxserve.errors import ModelLoadError
from jaxserve.layers.embedding import logits
from jaxserve.models import hf_config
from jaxserve.models.base import Params, ParamSpec, WeightNames, matrix
from jaxserve.models.drafts.base import DraftTensors, TargetSizes, Unembed

MAX_HEADS = 16
MAX_BLOCKS = 16


@dataclass(frozen=True)
class MedusaConfig:
    """num_blocks: residual blocks of a head. shared_unembed: the heads use the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_blocks: int
    shared_unembed: bool


def config_from_hf(
    config: Mapping[str, Any], target: TargetSizes, shared_unembed: bool = False
) -> MedusaConfig:
    """MedusaConfig of a config.json, which may leave the target's sizes out.

    shared_unembed: the checkpoint holds no unembeddings; config.json has no word for that.
    Raises ModelLoadError if it is for another target.
    """
    for name in ("hidden_size", "vocab_size"):
        got, want = (
            hf_config.positive_int(config, name, getattr(target, name)),
            getattr(target, name),
        )
        if got != want:
            raise ModelLoadError(
                f"config: {name} of the Medusa heads is {got}, the target's is {want}; take heads "
                "that were trained for this target"
            )
    return MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=hf_config.positive_int(config, "medusa_num_heads", limit=MAX_HEADS),
        num_blocks=hf_config.positive_int(config, "medusa_num_layers", 1, limit=MAX_BLOCKS),
        shared_unembed=shared_unembed,
    )


def param_specs(config: MedusaConfig) -> dict[str, Any]:
    """{"heads": [{"blocks": [{"weight" [E, E], "bias" [E]}], "unembed" [V, E] unless shared}]}."""
    E = config.hidden_size
    block = {"weight": matrix((E, E), ("embed", None)), "bias": ParamSpec((E,), (None,), "zeros")}
    head: dict[str, Any] = {"blocks": [block] * config.num_blocks}
    if not config.shared_unembed:
        head["unembed"] = matrix((config.vocab_size, E), ("vocab", "embed"))
    return {"heads": [head] * config.num_heads}


def weight_names(config: MedusaConfig) -> dict[str, Any]:
    """The published names: block b of head h is h.b.linear, the head's unembedding h.{blocks}."""

    def head(index: int) -> dict[str, Any]:
        blocks = [
            {kind: WeightNames((f"{index}.{block}.linear.{kind}",)) for kind in ("weight", "bias")}
            for block in range(config.num_blocks)
        ]
        names: dict[str, Any] = {"blocks": blocks}
        if not config.shared_unembed:
            names["unembed"] = WeightNames((f"{index}.{config.num_blocks}.weight",))
        return names

    return {"heads": [head(index) for index in range(config.num_heads)]}


def heads(
    config: MedusaConfig, params: Params, hidden: jax.Array, unembed: Unembed, ops: Ops
) -> jax.Array:
    """Logits float32 [heads, S, V] of the target's last hidden states [S, E].

    unembed: the target's, for heads that share it: all heads' states go through it at once.
    """
    states = [_blocks(head["blocks"], hidden, ops) for head in params["heads"]]
    if config.shared_unembed:
        S = hidden.shape[0]
        return unembed(jnp.concatenate(states)).reshape(config.num_heads, S, -1)
    return jnp.stack(
        [
            logits(ops, state, head["unembed"])
            for state, head in zip(states, params["heads"], strict=True)
        ]
    )


def _blocks(blocks: Params, x: jax.Array, ops: Ops) -> jax.Array:
    for block in blocks:
        x = x + jax.nn.silu(ops.linear(x, block["weight"], block["bias"]))
    return x


MEDUSA = DraftTensors("medusa", param_specs, weight_names)
