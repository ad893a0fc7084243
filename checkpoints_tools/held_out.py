"""How many tokens a draft would win, estimated on text it has not learnt from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.target_states import StatesBatch, TargetStates
from checkpoints_tools.training_text import PADDING
from jaxserve.core.ops import Ops
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Params

_ROWS = 256  # positions whose logits over the whole vocabulary are made at once


def target_choices(target: LoadedModel, ops: Ops, states: TargetStates) -> np.ndarray:
    """Of each position: the target's likeliest word, and the logarithm of the sum of all words'
    exponentials. float32 [N, L, 2]."""

    @jax.jit
    def choose(params: Params, hidden: jax.Array) -> jax.Array:
        logits = target.model.unembed(target.config, params, hidden, ops)[:, : target.vocab_size]
        return jnp.stack([jnp.argmax(logits, axis=1), jax.nn.logsumexp(logits, axis=1)], axis=1)

    N, L, E = states.hidden.shape
    flat = states.hidden.reshape(N * L, E)
    pad = -len(flat) % _ROWS
    parts = []
    for start in range(0, len(flat) + pad, _ROWS):
        part = np.zeros((_ROWS, E), np.float32)
        rows = flat[start : start + _ROWS]
        part[: len(rows)] = rows
        parts.append(np.asarray(choose(target.params, part)))
    return np.concatenate(parts)[: len(flat)].reshape(N, L, 2)


Score = Callable[[Params, Any, StatesBatch, Any], dict[str, jax.Array]]


class HeldOut:
    """Scores guesses on held-out windows: see `summary`.

    score(params, given, batch, choices) gives sums "greedy", "sampled" and "count" [steps].
    """

    def __init__(
        self, score: Score, given: Any, states: TargetStates, choices: np.ndarray, batch: int
    ) -> None:
        self._score = jax.jit(score)
        self._given = given
        self._states = states
        self._choices = choices
        self._batch = min(batch, len(states.windows))

    def __call__(self, params: Params) -> dict[str, Any]:
        """The summary of these params over all windows."""
        total: Any = None
        N = len(self._states.windows)
        for start in range(0, N, self._batch):
            index = np.arange(start, start + self._batch)
            part = _without_padding(self._states.batch(np.minimum(index, N - 1)), index < N)
            best = self._choices[np.minimum(index, N - 1)]
            found = jax.device_get(self._score(params, self._given, part, best))
            total = found if total is None else jax.tree.map(np.add, total, found)
        return summary(total)


def _without_padding(batch: StatesBatch, real: np.ndarray) -> StatesBatch:
    """Windows that only fill the batch up count as padding."""
    rows = np.where(real[:, None], batch.rows, PADDING)
    return StatesBatch(batch.tokens, rows, batch.positions, batch.hidden, batch.taps)


def summary(sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Acceptance at each step (given that the steps before were accepted) and the tokens that a
    round of so many drafts gives, its own one included: for greedy decoding ("greedy") and for
    drawing at temperature 1 ("sampled")."""
    count = np.maximum(sums["count"], 1)
    result: dict[str, Any] = {}
    for way in ("greedy", "sampled"):
        rates = [float(rate) for rate in sums[way] / count]
        result[way] = {"acceptance": rates, "tokens_per_round": tokens_per_round(rates)}
    return result


def tokens_per_round(acceptance: Sequence[float]) -> float:
    """1 + a1 + a1 a2 + ...: the tokens of a round, as if steps were accepted independently."""
    return float(1 + np.cumprod(acceptance).sum())
