"""Run speculative rounds on a toy: the steps that the engine compiles, on thousands of rows."""

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from jaxserve.eval.toy_model import Toy, toy_batch
from jaxserve.sampling import draft, make_state, verify
from jaxserve.sampling.residual import CLASSIC, Rule
from jaxserve.sampling_params import SamplingParams

# How drafts come about: one choice without noise; drawn with noise of their own; drawn with the
# noise of the target.
Proposals = Literal["one-hot", "classic", "coupled"]
PROPOSALS: tuple[Proposals, ...] = ("one-hot", "classic", "coupled")

_verify = jax.jit(verify, static_argnames=("vocab_size", "rule"))
_draft = jax.jit(draft, static_argnames="vocab_size")


@dataclass
class Rounds:
    """What came of them."""

    outputs: np.ndarray  # [rows, length] int32
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0  # rounds that ended with a rejection

    @property
    def tokens_per_round(self) -> float:
        return 1.0 + self.accepted / self.rounds

    @property
    def acceptance(self) -> float:
        """Accepted drafts among those that were judged: up to a round's first rejection."""
        return self.accepted / (self.accepted + self.rejected)


def run_rounds(
    toy: Toy,
    params: SamplingParams,
    proposals: Proposals,
    *,
    rows: int,
    num_drafts: int,
    length: int,
    first_seed: int = 0,
    rule: Rule = CLASSIC,
) -> Rounds:
    """Rounds of num_drafts drafts in each row, with a seed of its own, until all have `length`
    tokens."""
    tokens = np.zeros((rows, length + num_drafts), np.int32)
    lengths = np.zeros(rows, np.int32)
    context = np.zeros(rows, np.int32)
    state = make_state(rows + 1, toy.vocab)
    seeds, slots = first_seed + np.arange(rows), np.arange(1, rows + 1)
    coupled = np.full(rows, proposals == "coupled")
    result = Rounds(tokens[:, :length])
    place = np.arange(num_drafts + 1)
    while (active := lengths < length).any():
        given = {"seeds": seeds, "slots": slots, "active": active}
        drafts, probs, contexts = _propose(
            toy, params, proposals, context, lengths, num_drafts, seeds
        )
        positions = lengths[:, None] + place
        output, state = _verify(
            drafts,
            None if proposals == "one-hot" else probs,
            toy.target[contexts],
            toy_batch(params, positions, **given),
            state,
            vocab_size=toy.vocab,
            coupled=None if proposals == "one-hot" else coupled,
            rule=rule,
        )
        new, accepted = np.asarray(output.tokens), np.asarray(output.num_accepted)
        row, at = np.nonzero(active[:, None] & (place <= accepted[:, None]))
        tokens[row, positions[row, at]] = new[row, at]
        last = new[np.arange(rows), accepted]
        after = toy.follow(contexts[np.arange(rows), accepted], last)
        context = np.where(active, after, context)
        lengths = np.where(active, lengths + accepted + 1, lengths)
        result.rounds += int(active.sum())
        result.drafted += int(active.sum()) * num_drafts
        result.accepted += int(accepted[active].sum())
        result.rejected += int((accepted[active] < num_drafts).sum())
    return result


def _propose(
    toy: Toy,
    params: SamplingParams,
    proposals: Proposals,
    context: np.ndarray,
    lengths: np.ndarray,
    num_drafts: int,
    seeds: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafts [R, D], their distributions [R, D, V], and the contexts before and behind them
    [R, D + 1]."""
    rows = len(context)
    drafts = np.zeros((rows, num_drafts), np.int32)
    probs = np.zeros((rows, num_drafts, toy.vocab), np.float32)
    contexts = np.zeros((rows, num_drafts + 1), np.int32)
    contexts[:, 0] = context
    for place in range(num_drafts):
        logits = toy.draft[contexts[:, place]]
        if proposals == "one-hot":
            drafts[:, place] = logits.argmax(axis=1)
        else:
            drafts[:, place], probs[:, place] = _draft(
                logits,
                toy_batch(params, lengths[:, None] + place, seeds=seeds),
                np.full(rows, proposals == "coupled"),
                vocab_size=toy.vocab,
            )
        contexts[:, place + 1] = toy.follow(contexts[:, place], drafts[:, place])
    return drafts, probs, contexts
