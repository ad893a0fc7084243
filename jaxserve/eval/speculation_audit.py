"""Is the output of speculation the target's? Exactly on a toy, by samples on the compiled step.

The exact part lists all outputs of some length and adds up the probabilities of every way in which
rounds of drafting and judging can make them, from the step's own probabilities and its own
acceptance rule; they must be the products of the target's probabilities. The sampled part draws
from the compiled step itself, noise included, and asks a chi-square test.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.step_batch import SamplingBatch, SamplingState
from jaxserve.eval.chi_square import goodness_of_fit
from jaxserve.eval.toy_model import Toy, random_toy, toy_batch, true_outputs
from jaxserve.eval.toy_rounds import PROPOSALS, run_rounds
from jaxserve.sampling import draft, make_state
from jaxserve.sampling.positions import edited_logits, filters_of, per_position
from jaxserve.sampling.probabilities import probabilities
from jaxserve.sampling.residual import CLASSIC, Rule
from jaxserve.sampling.verify import counts_with_drafts
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.row_sum.reference import row_sum_reference

MAX_DISTANCE = 1e-5  # of exact distributions: what float32 rounds
MIN_P_VALUE = 1e-3  # of everything that is sampled, taken together
LENGTH = 3  # tokens of the outputs that are listed
MOST_DRAFTS = 4
SETTINGS = {
    "plain": SamplingParams(),
    "filters": SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05),
    "penalties and bias": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={2: 1.0}
    ),
    "min_tokens": SamplingParams(min_tokens=2, temperature=1.5),
}


class Check(NamedTuple):
    """One question of an audit and its answer."""

    name: str
    value: float
    limit: float
    passed: bool


# (q [N, V], p [N, V]) -> probabilities [N, V] of ending with each token as an accepted draft, and
# of ending with it after a rejection.
Outcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def classic_outcome(
    q: np.ndarray, p: np.ndarray, rule: Rule = CLASSIC
) -> tuple[np.ndarray, np.ndarray]:
    """Of drafts with noise of their own, by the functions that `verify` uses."""
    on_device = jnp.asarray(q), jnp.asarray(p)
    accepted = p * np.asarray(rule.acceptance(*on_device), np.float64)
    weights = np.asarray(rule.residual(*on_device), np.float64)
    total = weights.sum(axis=1, keepdims=True)
    share = np.where(total > 0.0, weights / np.where(total > 0.0, total, 1.0), q)
    return accepted, (1.0 - accepted.sum(axis=1, keepdims=True)) * share


def coupled_outcome(q: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of drafts with the target's noise: both races have the same winner x with probability
    1 / sum over y of max(q(y) / q(x), p(y) / p(x))."""
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.maximum(q[:, None, :] / q[:, :, None], p[:, None, :] / p[:, :, None])
        accepted = np.where((q > 0.0) & (p > 0.0), 1.0 / needed.sum(axis=2), 0.0)
    return accepted, q - accepted


def one_hot_outcome(q: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of drafts without noise: p's most likely token, accepted if it is drawn."""
    drafted = np.arange(p.shape[1]) == p.argmax(axis=1)[:, None]
    return np.where(drafted, q, 0.0), np.where(drafted, 0.0, q)


def speculative_outputs(
    q: Sequence[np.ndarray], p: Sequence[np.ndarray], num_drafts: int, outcome: Outcome
) -> np.ndarray:
    """The probability [V ** L] of each output of L tokens from rounds of num_drafts drafts.

    q[t], p[t] [V ** t, V] float64: the target's and the drafts' probabilities after each text.
    """
    # mass[j][text]: the text is out, and j drafts of the round are still to be judged.
    mass = [np.zeros(1) for _ in range(num_drafts)] + [np.ones(1)]
    for target, drafts in zip(q, p, strict=True):
        accepted, rejected = outcome(target, drafts)
        grown = [np.zeros(target.size) for _ in mass]
        for left, share in enumerate(mass):
            if left == 0:
                grown[num_drafts] += (share[:, None] * target).reshape(-1)
            else:
                grown[left - 1] += (share[:, None] * accepted).reshape(-1)
                grown[num_drafts] += (share[:, None] * rejected).reshape(-1)
        mass = grown
    return np.sum(mass, axis=0)


def step_probabilities(toy: Toy, params: SamplingParams, length: int) -> list[np.ndarray]:
    """What the compiled step takes for the target's probabilities after each text: float64
    [V ** t, V] for t below length."""
    texts = toy.prefixes(length - 1)
    contexts = np.zeros((len(texts), length), np.int32)
    for place in range(length - 1):
        contexts[:, place + 1] = toy.follow(contexts[:, place], texts[:, place])
    positions = np.broadcast_to(np.arange(length), contexts.shape)
    batch = toy_batch(params, positions, slots=1)
    probs = _step_probabilities(
        toy.target[contexts], texts, batch, make_state(2, toy.vocab), vocab=toy.vocab
    )
    return [
        np.asarray(probs, np.float64)[:: toy.vocab ** (length - 1 - depth), depth]
        for depth in range(length)
    ]


@partial(jax.jit, static_argnames="vocab")
def _step_probabilities(
    logits: jax.Array, drafts: jax.Array, batch: SamplingBatch, state: SamplingState, vocab: int
) -> jax.Array:
    rows, width, _ = logits.shape
    flat = per_position(batch, width)
    before = np.broadcast_to(np.tri(width, width - 1, -1, dtype=bool), (rows, width, width - 1))
    counts = counts_with_drafts(state, flat, drafts, before, vocab)
    edited = edited_logits(logits.reshape(rows * width, vocab), flat, counts)
    probs = probabilities(edited, filters_of(flat), flat.active, row_sum_reference)
    return probs.reshape(rows, width, vocab)


def draft_probabilities(toy: Toy, params: SamplingParams, length: int) -> list[np.ndarray]:
    """The distributions that `draft` names, after each text: float64 [V ** t, V]."""
    rows = len(toy.draft)
    batch = toy_batch(params, np.zeros((rows, 1), np.int32))
    _, probs = _draft(toy.draft, batch, np.zeros(rows, bool), vocab_size=toy.vocab)
    found = []
    for depth in range(length):
        context = np.zeros(toy.vocab**depth, np.int32)
        for tokens in toy.prefixes(depth).T:
            context = toy.follow(context, tokens)
        found.append(np.asarray(probs, np.float64)[context])
    return found


_draft = jax.jit(draft, static_argnames="vocab_size")


def exact_checks(toy: Toy | None = None, rule: Rule = CLASSIC) -> list[Check]:
    """The largest distance between the two distributions over outputs, for each kind of draft,
    whatever the settings and the number of drafts."""
    toy = toy or random_toy()
    outcomes: dict[str, Outcome] = {
        "one-hot": one_hot_outcome,
        "classic": partial(classic_outcome, rule=rule),
        "coupled": coupled_outcome,
    }
    worst = dict.fromkeys(outcomes, 0.0)
    for params in SETTINGS.values():
        truth = true_outputs(toy, params, LENGTH)
        q = step_probabilities(toy, params, LENGTH)
        p = draft_probabilities(toy, params, LENGTH)
        for name, outcome in outcomes.items():
            for num_drafts in range(1, MOST_DRAFTS + 1):
                with np.errstate(all="ignore"):  # of a broken rule; its distance is not a number
                    found = speculative_outputs(q, p, num_drafts, outcome)
                    distance = np.abs(found - truth).sum() / 2
                worst[name] = float(np.maximum(worst[name], distance))  # NaN stays, and fails
    return [
        Check(f"{name} drafts, exact distance", value, MAX_DISTANCE, value <= MAX_DISTANCE)
        for name, value in worst.items()
    ]


def sampled_checks(
    draws: int = 20_000, toy: Toy | None = None, rule: Rule = CLASSIC
) -> list[Check]:
    """Chi-square tests of outputs that the compiled step drew, for each setting and kind of
    draft."""
    toy = toy or random_toy()
    limit = MIN_P_VALUE / (len(SETTINGS) * len(PROPOSALS))
    checks = []
    for proposals in PROPOSALS:
        for name, params in SETTINGS.items():
            rounds = run_rounds(
                toy, params, proposals,
                rows=draws, num_drafts=MOST_DRAFTS, length=LENGTH, rule=rule,
            )  # fmt: skip
            numbers = rounds.outputs @ toy.vocab ** np.arange(LENGTH - 1, -1, -1)
            counts = np.bincount(numbers, minlength=toy.vocab**LENGTH)
            value = goodness_of_fit(counts, true_outputs(toy, params, LENGTH)).p_value
            checks.append(Check(f"{proposals} drafts, {name}: p", value, limit, value >= limit))
    return checks
