"""What a draft that goes on token by token is trained on: the chain of guesses it will make.

At pair t the draft reads the embedding of token t + 1 and a feature of position t and guesses token
t + 2. In step 0 the feature is the target's, in step j the draft's own of step j - 1. The guess is
held to the target's own distribution at position t + 1, whatever the text goes on with: the text
only leads the way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints_tools.target_states import StatesBatch
from checkpoints_tools.training_text import PADDING
from checkpoints_tools.whole_sequences import no_keys, sequence_batch
from jaxserve.core.ops import Ops
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.models.drafts.base import FeatureDraft

STEP_WEIGHT = 0.8  # of each step, relative to the one before it


@dataclass(frozen=True)
class ChainTask:
    """All fields are static. steps: guesses in a row. ops: of windows (see whole_sequences)."""

    draft: FeatureDraft
    config: Config
    target: ModelDef
    target_config: Config
    ops: Ops
    steps: int


@partial(jax.tree_util.register_dataclass, data_fields=["table", "words", "fixed"], meta_fields=[])
@dataclass(frozen=True)
class Given:
    """What training does not change. table [V, E]: the target's embeddings. words: the target's
    params that its unembed reads, cut to the draft's vocabulary. fixed: params of the draft that
    are no weights (d2t)."""

    table: Any
    words: Params
    fixed: Params


def chain_loss(task: ChainTask, params: Params, given: Given, batch: StatesBatch) -> jax.Array:
    """Mean cross-entropy to the target's distribution over the draft's words, steps weighted.

    Chains from the first token of a document are left out: models keep there what they have no use
    for, in features a thousand times larger than others (attention sinks, arXiv:2402.17762), whose
    gradients would drown all others.
    """
    target_log = jax.nn.log_softmax(_target_logits(task, given, batch), axis=-1)  # [B, L, V]
    wanted = jnp.exp(_ahead(target_log))
    total, weights = jnp.zeros(()), 0.0
    for step, (logits, valid) in enumerate(guesses(task, params, given, batch)):
        each = -jnp.sum(wanted * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        learnt = valid & (batch.positions > step)
        mean = jnp.sum(jnp.where(learnt, each, 0)) / jnp.maximum(jnp.sum(learnt), 1)
        total += STEP_WEIGHT**step * mean
        weights += STEP_WEIGHT**step
    return total / weights


def chain_scores(
    task: ChainTask, params: Params, given: Given, batch: StatesBatch, best: jax.Array
) -> dict[str, jax.Array]:
    """How often the likeliest word of each step would be accepted, summed: arrays [steps].

    best [B, L, 2] float32: the target's likeliest word at each position (as a number) and the
    logarithm of the sum of all its words' exponentials. Gives "greedy" (it is the target's
    likeliest), "sampled" (the target's probability of it) and "count".
    """
    target = _ahead(_target_logits(task, given, batch))
    best = _ahead(best)
    scores: dict[str, list[jax.Array]] = {"greedy": [], "sampled": [], "count": []}
    for logits, valid in guesses(task, params, given, batch):
        own = jnp.argmax(logits, axis=-1)
        ids = task.draft.target_ids(task.config, _whole(params, given), own.reshape(-1))
        same = ids.reshape(own.shape) == best[..., 0].astype(jnp.int32)
        chosen = jnp.take_along_axis(target, own[..., None], axis=-1)[..., 0]
        probability = jnp.exp(chosen - best[..., 1])
        for name, values in (("greedy", same), ("sampled", probability), ("count", 1.0)):
            scores[name].append(jnp.sum(jnp.where(valid, values, 0.0)))
    return {name: jnp.stack(values) for name, values in scores.items()}


def guesses(
    task: ChainTask, params: Params, given: Given, batch: StatesBatch
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Of each step: logits [B, L, draft vocabulary], and where they are a guess of a token that
    the window holds [B, L] bool."""
    B, L = batch.tokens.shape
    draft, config, ops = task.draft, task.config, task.ops
    params = _whole(params, given)
    step_batch = sequence_batch(batch.tokens, batch.rows, batch.positions)
    embeddings = ops.embed(given.table, _ahead(batch.tokens).reshape(-1))
    captured = batch.taps if draft.tap_names(config) else batch.hidden
    features = draft.fuse(config, params, captured.reshape(B * L, -1), ops)
    follows = (batch.rows != PADDING) & (_ahead(batch.rows, PADDING) == batch.rows)
    keys = no_keys()

    def unembed(hidden: jax.Array) -> jax.Array:
        return task.target.unembed(task.target_config, given.words, hidden, ops)

    for step in range(task.steps):
        features, keys = draft.forward(config, params, embeddings, features, step_batch, keys, ops)
        logits = draft.logits(config, params, features, unembed, ops)
        yield logits.reshape(B, L, -1), follows & (batch.positions >= step)
        # The feature of position t + 1 that pair t gave is what pair t + 1 reads next.
        features = jnp.roll(features.reshape(B, L, -1), 1, axis=1).reshape(B * L, -1)


def _target_logits(task: ChainTask, given: Given, batch: StatesBatch) -> jax.Array:
    """[B, L, draft vocabulary]: what the target says comes after each position."""
    B, L, E = batch.hidden.shape
    hidden = batch.hidden.reshape(B * L, E)
    logits = task.target.unembed(task.target_config, given.words, hidden, task.ops)
    return logits.reshape(B, L, -1)


def _ahead(x: jax.Array, last: float = 0) -> jax.Array:
    """x [B, L, ...] of the next position; `last` at the end of a window."""
    pad = [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, pad, constant_values=last)[:, 1:]


def _whole(params: Params, given: Given) -> Params:
    return {**params, **given.fixed}
