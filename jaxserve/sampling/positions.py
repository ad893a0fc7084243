"""From the logits of single positions to their tokens: what sampling and verifying share.

A position is a row of flat arrays [S = R x W]. Its draw needs its own logits, its row's settings,
its place in the request and the counts of the tokens before it, and nothing of its neighbours.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.step_batch import Logprobs, SamplingBatch
from jaxserve.sampling import largest
from jaxserve.sampling.draws import SMALLEST_TEMPERATURE, Filters, RowSum, draw
from jaxserve.sampling.logprobs import no_logprobs, raw_logprobs
from jaxserve.sampling.masks import add_bias, suppress
from jaxserve.sampling.penalties import penalise
from jaxserve.sampling.random import draw_keys

# in_prompt [S, V] bool and output_counts [S, V] int32, gathered only where penalties are computed.
Counts = Callable[[], tuple[jax.Array, jax.Array]]


def draw_tokens(
    raw: jax.Array, flat: SamplingBatch, counts: Counts, row_sum: RowSum
) -> tuple[jax.Array, jax.Array]:
    """Tokens [S] of raw logits [S, V], and which active positions are sound [S].

    Unsound: a NaN or +inf in the raw logits, or nothing that may be drawn. Positions that are
    unsound or inactive hold token 0.
    """
    # A sum, since XLA:CPU's maximum passes some NaN by. From here on a row with NaN or +inf counts
    # as idle, so that it cannot make the others pay for its settings.
    flat = replace(flat, active=flat.active & (jnp.sum(raw, axis=1) < jnp.inf))
    edits = _edits(flat)
    drawn = is_drawn(flat)
    plain = ~jnp.any(drawn | edits.held | edits.biased | edits.penalised)
    tokens, finite = lax.cond(
        plain,
        lambda: _largest(raw),
        lambda: _choose(_edit(raw, edits, flat, counts), flat, drawn, row_sum),
    )
    sound = flat.active & finite
    return jnp.where(sound, tokens, 0), sound


def edited_logits(raw: jax.Array, flat: SamplingBatch, counts: Counts) -> jax.Array:
    """Logits [S, V] that active positions draw from, before temperature and filters."""
    return _edit(raw, _edits(flat), flat, counts)


def is_drawn(flat: SamplingBatch) -> jax.Array:
    """Which positions [S] are active and not greedy."""
    return flat.active & (flat.temperature >= SMALLEST_TEMPERATURE)


def asked_logprobs(
    raw: jax.Array, tokens: jax.Array, flat: SamplingBatch, sound: jax.Array, row_sum: RowSum
) -> Logprobs:
    """Logprobs, leading axis S, of tokens [S]; zeros if no sound position's row asked for any."""
    asked = sound & (flat.num_logprobs >= 0)
    return lax.cond(
        jnp.any(asked),
        lambda: raw_logprobs(raw, tokens, row_sum),
        lambda: no_logprobs(raw.shape[0]),
    )


def per_position(sampling: SamplingBatch, width: int) -> SamplingBatch:
    """The same settings with R x W rows, one for each sampled position."""
    flat = jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), width, axis=0), sampling)
    return replace(flat, positions=jnp.asarray(sampling.positions).reshape(-1))


class _Edits(NamedTuple):
    """Which rows [S] have their logits changed, and by what."""

    held: jax.Array
    biased: jax.Array
    penalised: jax.Array


def _edits(flat: SamplingBatch) -> _Edits:
    penalised = (
        (flat.repetition_penalty != 1.0)
        | (flat.presence_penalty != 0.0)
        | (flat.frequency_penalty != 0.0)
    )
    return _Edits(
        held=flat.active & (flat.positions < flat.suppress_until),
        biased=flat.active & jnp.any(flat.bias_ids >= 0, axis=1),
        penalised=flat.active & penalised,
    )


def _edit(logits: jax.Array, edits: _Edits, flat: SamplingBatch, counts: Counts) -> jax.Array:
    """Logits [S, V] after held-back ids, bias and penalties."""

    def penalised(logits: jax.Array) -> jax.Array:
        return penalise(
            logits,
            *counts(),
            flat.repetition_penalty,
            flat.presence_penalty,
            flat.frequency_penalty,
        )

    steps = (
        (edits.held, lambda logits: suppress(logits, flat.suppress_ids, edits.held)),
        (edits.biased, lambda logits: add_bias(logits, flat.bias_ids, flat.bias_values)),
        (edits.penalised, penalised),
    )

    def edited(logits: jax.Array) -> jax.Array:
        for rows, step in steps:
            logits = lax.cond(jnp.any(rows), step, lambda logits: logits, logits)
        return logits

    # One condition around all: each costs a copy of the logits when it is false.
    anything = jnp.any(edits.held | edits.biased | edits.penalised)
    return lax.cond(anything, edited, lambda logits: logits, logits)


def _largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Greedy tokens [S], and which rows have a finite largest logit."""
    peak, best = largest.argmax(logits)
    return best, jnp.isfinite(peak)


def _choose(
    logits: jax.Array, flat: SamplingBatch, drawn: jax.Array, row_sum: RowSum
) -> tuple[jax.Array, jax.Array]:
    """Tokens [S] from edited logits [S, V], drawn in the rows `drawn` and greedy in the others;
    and which rows have a finite largest logit."""
    peak, best = largest.argmax(logits)
    finite = jnp.isfinite(peak)
    filters = filters_of(flat)
    wanted = drawn & finite

    def drawn_tokens() -> jax.Array:
        keys = draw_keys(flat.seed, flat.choice, flat.positions)
        return jnp.where(wanted, draw(logits, peak, filters, keys, wanted, row_sum), best)

    return lax.cond(jnp.any(wanted), drawn_tokens, lambda: best), finite


def filters_of(flat: SamplingBatch) -> Filters:
    """What shapes the rows' distributions; greedy rows get the smallest temperature."""
    return Filters(
        temperature=jnp.maximum(flat.temperature, SMALLEST_TEMPERATURE),
        top_k=flat.top_k,
        top_p=flat.top_p,
        min_p=flat.min_p,
    )
