"""The classic acceptance rule, for drafts that were drawn from a distribution p of their own.

Accept a draft x with probability min(1, q(x) / p(x)), or else draw from max(q - p, 0), normalised:
together exactly q (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", ICML 2023; Chen et al., "Accelerating large language model decoding with speculative
sampling", 2023). It holds as long as whether a draft is made, and how many, never depends on the
value that the draft's own noise drew.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.sampling import largest
from jaxserve.sampling.random import ACCEPT, RESIDUAL, gumbel, uniform


class Rule(NamedTuple):
    """How a draft of probability p is judged where the target gives it q; both elementwise."""

    acceptance: Callable[[jax.Array, jax.Array], jax.Array]  # (q, p) -> probability of accepting
    residual: Callable[[jax.Array, jax.Array], jax.Array]  # (q, p) -> weight to draw in its place


def acceptance(q: jax.Array, p: jax.Array) -> jax.Array:
    """min(1, q / p), 1 where p is 0; NaN in either accepts nothing."""
    return jnp.where(q >= p, 1.0, q / p)


def residual(q: jax.Array, p: jax.Array) -> jax.Array:
    """max(q - p, 0), not normalised; NaN in either weighs nothing."""
    return jnp.where(q > p, q - p, 0.0)


CLASSIC = Rule(acceptance, residual)


class Judged(NamedTuple):
    """What became of each row's drafts."""

    accepted: jax.Array  # [R, D] bool
    replacement: jax.Array  # [R] int32: for the first draft that was not accepted, if there is one


def judge(
    drafts: jax.Array,
    draft_probs: jax.Array,
    probs: jax.Array,
    keys: jax.Array,
    drawn: jax.Array,
    rule: Rule,
) -> Judged:
    """Judge drafts [R, D] from draft_probs [R, D, V] against the target's probs [R, D, V].

    keys [R, D, 2] are those of the drafts' positions; drawn [R, D]: tokens drawn from probs with
    noise of purpose DRAW. Drafts that are not there are to be ignored by the caller.
    """
    rows, count, vocab = probs.shape
    place = jnp.clip(drafts, 0, vocab - 1)[:, :, None]
    q = jnp.take_along_axis(probs, place, axis=2)[:, :, 0]
    p = jnp.take_along_axis(draft_probs, place, axis=2)[:, :, 0]
    luck = uniform(keys.reshape(rows * count, 2), ACCEPT).reshape(rows, count)
    accepted = luck < rule.acceptance(q, p)
    # Of each row only the first rejection matters, so only there are tokens drawn again.
    first = jnp.argmin(accepted, axis=1)[:, None]  # [R, 1]
    at_first = first[:, :, None]
    weights = rule.residual(
        jnp.take_along_axis(probs, at_first, axis=1)[:, 0],
        jnp.take_along_axis(draft_probs, at_first, axis=1)[:, 0],
    )
    noise = gumbel(
        jnp.take_along_axis(keys, at_first, axis=1)[:, 0],
        jnp.arange(vocab, dtype=jnp.int32)[None, :],
        RESIDUAL,
    )
    scores = jnp.where(weights > 0.0, jnp.log(weights) + noise, -jnp.inf)
    peak, replacement = largest.argmax(scores)
    # Nothing is left where q and p are the same but for rounding, or where p is not a number.
    fallback = jnp.take_along_axis(drawn, first, axis=1)[:, 0]
    return Judged(accepted, jnp.where(peak > -jnp.inf, replacement, fallback))
