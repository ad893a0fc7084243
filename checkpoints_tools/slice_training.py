"""A draft model cut out of its target: some of the layers, distilled on the target's answers.

Prune-and-distil (Muralidharan et al. 2024, arXiv:2407.14679): the kept layers and all norms are
trained on the target's distributions; embeddings and unembedding stay the target's.
"""

from collections.abc import Mapping
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
from checkpoints_tools.whole_sequences import no_keys, sequence_batch, sequence_ops
from jaxserve.core.ops import Ops
from jaxserve.errors import InvalidRequestError
from jaxserve.models import llama
from jaxserve.models.base import Config, ModelDef, Params

_TABLES = ("embed", "unembed")  # not trained
ESTIMATED_GUESSES = 4  # in a row, of the tokens a round gives


@dataclass(frozen=True)
class SliceTask:
    """All fields are static. config: the draft's; target_config: the target's."""

    model: ModelDef
    config: Config
    target_config: Config
    ops: Ops

    def logits(self, params: Params, tables: Params, batch: StatesBatch) -> jax.Array:
        """The draft's [B, L, V]."""
        whole = {**params, **tables}
        step = sequence_batch(batch.tokens, batch.rows, batch.positions)
        hidden, _, _ = self.model.forward(self.config, whole, step, no_keys(), self.ops)
        logits = self.model.unembed(self.config, whole, hidden, self.ops)
        return logits.reshape(*batch.tokens.shape, -1)

    def target_logits(self, tables: Params, batch: StatesBatch) -> jax.Array:
        """The target's [B, L, V], from its kept hidden states."""
        flat = batch.hidden.reshape(-1, batch.hidden.shape[-1])
        logits = self.model.unembed(self.target_config, tables, flat, self.ops)
        return logits.reshape(*batch.tokens.shape, -1)


def slice_loss(task: SliceTask, params: Params, tables: Params, batch: StatesBatch) -> jax.Array:
    """Mean cross-entropy to the target's distribution at every position."""
    wanted = jax.nn.softmax(task.target_logits(tables, batch), axis=-1)
    own = jax.nn.log_softmax(task.logits(params, tables, batch), axis=-1)
    each = -jnp.sum(wanted * own, axis=-1)
    real = batch.rows != PADDING
    return jnp.sum(jnp.where(real, each, 0)) / jnp.maximum(jnp.sum(real), 1)


def slice_scores(
    task: SliceTask, params: Params, tables: Params, batch: StatesBatch, choices: jax.Array
) -> dict[str, jax.Array]:
    """As `chain_loss.chain_scores`; a model of its own guesses equally well at every step."""
    best = jnp.argmax(task.logits(params, tables, batch), axis=-1)
    target = task.target_logits(tables, batch)
    chosen = jnp.take_along_axis(target, best[..., None], axis=-1)[..., 0]
    found = {
        "greedy": best == choices[..., 0].astype(jnp.int32),
        "sampled": jnp.exp(chosen - choices[..., 1]),
        "count": jnp.ones(best.shape),
    }
    real = batch.rows != PADDING
    return {
        name: jnp.repeat(jnp.sum(jnp.where(real, values, 0.0)), ESTIMATED_GUESSES)
        for name, values in found.items()
    }


@dataclass(frozen=True)
class SlicePlan:
    """A slice of a target. layers: the target's that are kept. See `training_run.Plan`."""

    config: llama.LlamaConfig
    json_config: Mapping[str, Any]
    target: Target
    layers: tuple[int, ...]

    @property
    def tap_names(self) -> tuple[str, ...]:
        return ()

    @property
    def identity(self) -> Mapping[str, Any]:
        return {**self.json_config, "layers": self.layers}

    def about(self, text: Windows) -> str:  # noqa: ARG002
        kept = ", ".join(map(str, self.layers))
        return f"slice: layers {kept} of the target's {self.target.model.config.num_layers}"

    def first(self, seed: int) -> Params:  # noqa: ARG002
        """The target's own weights."""
        params = self.target.model.params
        own = {name: value for name, value in params.items() if name not in _TABLES}
        return own | {"layers": [params["layers"][index] for index in self.layers]}

    def learner(self, held_out: TargetStates, batch: int) -> Learner:
        model = self.target.model
        length = held_out.windows.tokens.shape[1]
        ops = sequence_ops(llama.kv_spec(self.config), length)
        task = SliceTask(model.model, self.config, model.config, ops)
        choices = target_choices(model, ops, held_out)
        score = HeldOut(partial(slice_scores, task), self._tables, held_out, choices, batch)
        return Learner(partial(slice_loss, task), self._tables, score)

    def tensors(self, params: Params, tap_scale: np.ndarray) -> dict[str, np.ndarray]:  # noqa: ARG002
        return named_tensors(llama.MODEL, self.config, {**params, **self._tables}, self.config)

    @property
    def _tables(self) -> Params:
        params = self.target.model.params
        return {name: params[name] for name in _TABLES if name in params}


def spread_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """`kept` of the layers, first and last among them, the others evenly between."""
    return tuple(dict.fromkeys(np.linspace(0, num_layers - 1, kept).round().astype(int).tolist()))


def plan_slice(target: Target, layers: tuple[int, ...]) -> SlicePlan:
    """layers: the target's to keep, ascending. Raises InvalidRequestError for a target that is no
    Llama of one kind of layer, or has no such layers."""
    model = target.model
    config = model.config
    if model.model is not llama.MODEL or len(set(config.windows)) != 1:
        raise InvalidRequestError(
            f"{target.name}: slices are made of the Llama family without layers of several kinds; "
            f"this is {model.model.name!r}. Train an eagle3 draft for it"
        )
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= config.num_layers:
        raise InvalidRequestError(
            f"layers are {list(layers)[:40]}; want some of 0 to {config.num_layers - 1}, ascending",
            "layers",
        )
    sizes = {"num_hidden_layers": len(layers), "torch_dtype": "float32"}
    json_config = {**target.json_config, **sizes}
    return SlicePlan(llama.config_from_hf(json_config), json_config, target, layers)
