"""A target and a draft model so small that all their outputs can be listed.

A token's logits depend on the last two tokens. What the sampler should make of them is computed
here once more, in float64 and by sorting, from the tokens themselves.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.core.step_batch import SamplingBatch
from jaxserve.sampling_params import SamplingParams

EOS = 0  # what min_tokens holds back; outputs go on after it
MAX_BIAS = 4


@dataclass(frozen=True)
class Toy:
    """Logits [V * V, V] float32 by context: the last two tokens, as one number."""

    target: np.ndarray
    draft: np.ndarray

    @property
    def vocab(self) -> int:
        return int(self.target.shape[1])

    def follow(self, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The contexts after one more token each."""
        return (context * self.vocab + tokens) % len(self.target)

    def prefixes(self, length: int) -> np.ndarray:
        """All texts of so many tokens, in the order of their numbers: [V ** length, length]."""
        texts = list(itertools.product(range(self.vocab), repeat=length))
        return np.array(texts, np.int32).reshape(len(texts), length)


def random_toy(vocab: int = 4, seed: int = 0, likeness: float = 0.7) -> Toy:
    """Any two models; likeness from 0 to 1: how much the draft model's logits are the target's."""
    rng = np.random.default_rng(seed)
    target, other = rng.normal(size=(2, vocab * vocab, vocab)) * 1.2
    draft = likeness * target + (1.0 - likeness) * other
    return Toy(target.astype(np.float32), draft.astype(np.float32))


def constant_toy(target: Sequence[float], draft: Sequence[float]) -> Toy:
    """Models that give every token the same probabilities, whatever came before."""
    vocab = len(target)
    with np.errstate(divide="ignore"):
        logits = [np.log(np.asarray(side, np.float64)) for side in (target, draft)]
    rows = [np.tile(side.astype(np.float32), (vocab * vocab, 1)) for side in logits]
    return Toy(rows[0], rows[1])


def toy_batch(
    params: SamplingParams,
    positions: np.ndarray,
    *,
    seeds: np.ndarray | int = 0,
    slots: np.ndarray | int = 0,
    active: np.ndarray | bool = True,
) -> SamplingBatch:
    """The same settings for all rows; positions [R, W] count from the first output token."""
    rows = len(positions)

    def every(value: object, kind: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, kind), rows).copy()

    # As wide as a toy needs, and not as the engine's: thousands of rows go through at once.
    bias_ids = np.full((rows, MAX_BIAS), -1, np.int32)
    bias_values = np.zeros((rows, MAX_BIAS), np.float32)
    bias_ids[:, : len(params.logit_bias)] = list(params.logit_bias)
    bias_values[:, : len(params.logit_bias)] = list(params.logit_bias.values())
    return SamplingBatch(
        active=every(active, np.bool_),
        temperature=every(params.temperature, np.float32),
        top_k=every(params.top_k, np.int32),
        top_p=every(params.top_p, np.float32),
        min_p=every(params.min_p, np.float32),
        repetition_penalty=every(params.repetition_penalty, np.float32),
        presence_penalty=every(params.presence_penalty, np.float32),
        frequency_penalty=every(params.frequency_penalty, np.float32),
        bias_ids=bias_ids,
        bias_values=bias_values,
        suppress_ids=np.full((rows, 1), EOS, np.int32),
        suppress_until=every(params.min_tokens, np.int32),
        seed=np.stack([every(seeds, np.uint32), every(0, np.uint32)], axis=1),
        choice=every(0, np.int32),
        positions=positions.astype(np.int32),
        slot=every(slots, np.int32),
        num_logprobs=every(-1, np.int32),
    )


def true_outputs(toy: Toy, params: SamplingParams, length: int) -> np.ndarray:
    """The probability of each output of so many tokens, drawn one by one: [V ** length] float64."""
    share = np.ones(1)
    for depth in range(length):
        texts = toy.prefixes(depth)
        rows = [true_probabilities(toy, params, text.tolist()) for text in texts]
        share = (share[:, None] * np.array(rows)).reshape(-1)
    return share


def true_probabilities(toy: Toy, params: SamplingParams, text: list[int]) -> np.ndarray:
    """Of the token after these output tokens: [V] float64."""
    context = 0
    for token in text:
        context = (context * toy.vocab + token) % len(toy.target)
    logits = _edited(toy.target[context].astype(np.float64), params, text)
    return _filtered(logits, params)


def _edited(logits: np.ndarray, params: SamplingParams, text: list[int]) -> np.ndarray:
    if len(text) < params.min_tokens:
        logits[EOS] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(text):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * text.count(token) + params.presence_penalty
    return logits


def _filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / max(params.temperature, 1e-30))
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        weights[logits < logits[order[min(params.top_k, len(logits)) - 1]]] = 0.0
    weights[weights < params.min_p] = 0.0
    above = math.fsum(weights) * params.top_p
    if params.top_p < 1.0:
        held = np.array([weights[weights > one].sum() for one in weights])
        weights[(held > 0.0) & (held >= above)] = 0.0
    return weights / weights.sum()
