"""The distribution a row is drawn from, as numbers: what the classic acceptance rule divides.

Drawing needs no probabilities (draws.py); these are the ones its draws have, by the same
thresholds: top_k and min_p first, then top_p of what they leave, ties at every threshold kept.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling import largest
from jaxserve.sampling.draws import (
    CANDIDATES,
    Filters,
    RowSum,
    scale_and_keep,
    too_rare,
    top_k_floor,
)


def probabilities(
    logits: jax.Array, filters: Filters, wanted: jax.Array, row_sum: RowSum
) -> jax.Array:
    """Probabilities [S, V] float32 in the rows `wanted` [S]; what the others hold means nothing.

    logits [S, V] float32 as they are before temperature, with a finite largest in wanted rows.
    """
    vocab = logits.shape[1]
    peak, _ = largest.argmax(logits)
    limited = wanted & (filters.top_k > 0) & (filters.top_k < vocab)
    floor = top_k_floor(logits, filters.top_k, limited)
    scaled, kept = scale_and_keep(logits, floor[:, None], peak, filters)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    filtered = wanted & (filters.top_p < 1.0)
    weights = lax.cond(
        jnp.any(filtered),
        lambda: _without_tail(weights, filters.top_p, filtered, row_sum),
        lambda: weights,
    )
    return weights / row_sum(weights)[:, None]


def _without_tail(
    weights: jax.Array, top_p: jax.Array, filtered: jax.Array, row_sum: RowSum
) -> jax.Array:
    """Weights [S, V] with zeros where top_p drops the token, in the rows `filtered` [S].

    What is dropped in a row is all up to some weight, so that one is searched for: by bisection
    among the largest weights, and bit by bit in rows where all of these are kept.
    """
    target = top_p * row_sum(weights)

    def dropped(weight: jax.Array) -> jax.Array:
        return filtered & too_rare(weights, weight[:, None], target, row_sum)

    count = min(CANDIDATES, weights.shape[1])
    top, _ = largest.top_k(weights, count)
    place = _first_dropped(top, dropped)
    bar = jnp.take_along_axis(top, jnp.minimum(place, count - 1)[:, None], axis=1)[:, 0]
    bar = jnp.where(place < count, bar, 0.0)
    deep = filtered & (place == count) & (top[:, -1] > 0.0)
    bar = lax.cond(
        jnp.any(deep),
        lambda: jnp.where(deep, _largest_dropped(dropped, deep), bar),
        lambda: bar,
    )
    return jnp.where(weights > bar[:, None], weights, 0.0)


def _first_dropped(top: jax.Array, dropped: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Index [S] of the first of the falling weights top [S, C] that is dropped; C: none is."""
    rows, count = top.shape

    def halve(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state  # what is below `low` is kept; `high` is dropped, or is C
        middle = jnp.minimum((low + high) // 2, count - 1)
        out = dropped(jnp.take_along_axis(top, middle[:, None], axis=1)[:, 0])
        high = jnp.where(out, jnp.minimum(high, middle), high)
        return jnp.where(out, low, jnp.maximum(low, middle + 1)), high

    start = jnp.zeros(rows, jnp.int32), jnp.full(rows, count, jnp.int32)
    return lax.fori_loop(0, count.bit_length(), halve, start)[1]


def _largest_dropped(dropped: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """The largest float32 [S] that is dropped, in `rows`: floats from 0 on sort like their bits."""

    def refine(step: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (jnp.uint32(0x40000000) >> step.astype(jnp.uint32))
        weight = lax.bitcast_convert_type(trial, jnp.float32)
        return jnp.where(rows & dropped(weight), trial, found)

    found = lax.fori_loop(0, 31, refine, jnp.zeros(rows.shape, jnp.uint32))
    return lax.bitcast_convert_type(found, jnp.float32)
