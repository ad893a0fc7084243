"""Training Medusa heads: each learns the target's distribution one position further ahead."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.fit import Learner
from checkpoints_tools.held_out import HeldOut, target_choices
from checkpoints_tools.published_layout import named_tensors
from checkpoints_tools.target_checkpoint import Target
from checkpoints_tools.target_states import StatesBatch, TargetStates
from checkpoints_tools.training_text import PADDING, Windows
from checkpoints_tools.whole_sequences import sequence_ops
from jaxserve.core.ops import Ops
from jaxserve.loading.assemble import random_params
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.models.drafts.base import target_sizes
from jaxserve.models.drafts.medusa import MEDUSA, MedusaConfig, config_from_hf, heads

HEAD_WEIGHT = 0.8  # of each head's loss, relative to the head before it


@dataclass(frozen=True)
class MedusaTask:
    """All fields are static."""

    config: MedusaConfig
    target: ModelDef
    target_config: Config
    ops: Ops

    def unembed(self, target_params: Params, hidden: jax.Array) -> jax.Array:
        """The target's logits [S, V] of hidden [S, E]."""
        return self.target.unembed(self.target_config, target_params, hidden, self.ops)


def medusa_loss(
    task: MedusaTask, params: Params, target_params: Params, batch: StatesBatch
) -> jax.Array:
    """Mean cross-entropy of every head to the target's distribution, heads weighted."""
    wanted = jax.nn.softmax(task.unembed(target_params, _flat(batch.hidden)))  # [B L, V]
    total, weights = jnp.zeros(()), 0.0

    # Logits of one head at a time: each head's are as wide as the vocabulary.
    @partial(jax.checkpoint, static_argnums=1)
    def of_head(own: Params, ahead: int) -> jax.Array:
        logits = _head_logits(task, own, target_params, batch)
        wanted_there = _later(wanted.reshape(*batch.tokens.shape, -1), ahead)
        each = -jnp.sum(wanted_there * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        valid = _valid(batch, ahead)
        return jnp.sum(jnp.where(valid, each, 0)) / jnp.maximum(jnp.sum(valid), 1)

    for index, own in enumerate(params["heads"]):
        total += HEAD_WEIGHT**index * of_head(own, index + 1)
        weights += HEAD_WEIGHT**index
    return total / weights


def medusa_scores(
    task: MedusaTask,
    params: Params,
    target_params: Params,
    batch: StatesBatch,
    choices: jax.Array,
) -> dict[str, jax.Array]:
    """As `chain_loss.chain_scores`, with a head for each step."""
    target = task.unembed(target_params, _flat(batch.hidden)).reshape(*batch.tokens.shape, -1)
    scores: dict[str, list[jax.Array]] = {"greedy": [], "sampled": [], "count": []}
    for own, ahead in _heads_and_distances(params):
        best = jnp.argmax(_head_logits(task, own, target_params, batch), axis=-1)
        there = _later(choices, ahead)
        chosen = jnp.take_along_axis(_later(target, ahead), best[..., None], axis=-1)[..., 0]
        probability = jnp.exp(chosen - there[..., 1])
        same = best == there[..., 0].astype(jnp.int32)
        for name, values in (("greedy", same), ("sampled", probability), ("count", 1.0)):
            scores[name].append(jnp.sum(jnp.where(_valid(batch, ahead), values, 0.0)))
    return {name: jnp.stack(values) for name, values in scores.items()}


def _heads_and_distances(params: Params) -> Iterator[tuple[Params, int]]:
    for index, own in enumerate(params["heads"]):
        yield own, index + 1


def _head_logits(
    task: MedusaTask, own: Params, target_params: Params, batch: StatesBatch
) -> jax.Array:
    """[B, L, V] of one head."""
    alone = MedusaConfig(**{**vars(task.config), "num_heads": 1})
    unembed = partial(task.unembed, target_params)
    logits = heads(alone, {"heads": [own]}, _flat(batch.hidden), unembed, task.ops)
    return logits.reshape(*batch.tokens.shape, -1)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _later(x: jax.Array, ahead: int) -> jax.Array:
    """x [B, L, ...] of `ahead` positions later; the last ones are of no use."""
    return jnp.roll(x, -ahead, axis=1)


def _valid(batch: StatesBatch, ahead: int) -> jax.Array:
    """Where the position `ahead` later is of the same document."""
    L = batch.tokens.shape[1]
    inside = np.arange(L) < L - ahead
    return inside & (batch.rows != PADDING) & (_later(batch.rows, ahead) == batch.rows)


@dataclass(frozen=True)
class MedusaPlan:
    """Heads to be trained for a target, which share its unembedding. See `training_run.Plan`."""

    config: MedusaConfig
    json_config: Mapping[str, Any]
    target: Target

    @property
    def tap_names(self) -> tuple[str, ...]:
        return ()

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.json_config

    def about(self, text: Windows) -> str:  # noqa: ARG002
        return f"medusa: {self.config.num_heads} heads, which share the target's unembedding"

    def first(self, seed: int) -> Params:
        """Blocks that change nothing: every head begins as the target's own guess."""
        params = random_params(MEDUSA, self.config, seed, "float32")
        for head in params["heads"]:
            for block in head["blocks"]:
                block["weight"] = jnp.zeros_like(block["weight"])
        return params

    def learner(self, held_out: TargetStates, batch: int) -> Learner:
        model = self.target.model
        length = held_out.windows.tokens.shape[1]
        ops = sequence_ops(model.model.kv_spec(model.config), length)
        task = MedusaTask(self.config, model.model, model.config, ops)
        given = {name: model.params[name] for name in ("embed", "unembed") if name in model.params}
        choices = target_choices(model, ops, held_out)
        score = HeldOut(partial(medusa_scores, task), given, held_out, choices, batch)
        return Learner(partial(medusa_loss, task), given, score)

    def tensors(self, params: Params, tap_scale: np.ndarray) -> dict[str, np.ndarray]:  # noqa: ARG002
        return named_tensors(MEDUSA, self.config, params, None)


def plan_medusa(target: Target, *, heads: int, blocks: int = 1) -> MedusaPlan:
    """heads: tokens that are guessed at once. Raises ModelLoadError for a target without sizes."""
    sizes = target_sizes(target.model.config)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "base_model_name_or_path": target.name,
    }
    return MedusaPlan(config_from_hf(config, sizes, shared_unembed=True), config, target)
