"""Draw one token per row from what temperature, top_k, min_p and top_p leave of its logits.

A draw is a race: every token's score is its logit / temperature plus its noise, and the highest
score among the kept tokens wins (Gumbel-max). Nothing is sorted to find out which are kept:

- top_k needs the k-th largest logit. For k below CANDIDATES it is among that many largest logits,
  and then the whole race takes place among them ("narrow" rows); otherwise it is searched for
  bit by bit.
- min_p is a floor relative to the largest probability.
- top_p is asked only about the winner: it is kept iff the tokens more likely than it hold less
  than top_p of the mass. If not, it and all that are no more likely are out, and the race is run
  again among the rest with the same noise: exactly the race among the kept tokens. A row needs
  another round with a chance of at most 1 - top_p; if top_p is tiny, about ln(V) rounds.

A row's path depends on its own settings and logits, never on its neighbours'.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling import largest
from jaxserve.sampling.random import DRAW, gumbel

CANDIDATES = 128
# Below the smallest normal number XLA's CPU code takes a float for zero, so such a temperature is
# greedy: dividing by it would give 0 / 0.
SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)


# Sums of the rows [S] of [S, N]. A backend may have one whose order no other row can change.
RowSum = Callable[[jax.Array], jax.Array]


class Filters(NamedTuple):
    """What shapes each row's distribution, one value a row [S]; 0, 1 and 0 switch a filter off."""

    temperature: jax.Array  # float32, at least SMALLEST_TEMPERATURE
    top_k: jax.Array  # int32; 0 and less, or V and more: all
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32


def draw(
    logits: jax.Array,
    peak: jax.Array,
    filters: Filters,
    keys: jax.Array,
    wanted: jax.Array,
    row_sum: RowSum,
) -> jax.Array:
    """Tokens [S] int32 drawn in the rows `wanted` [S]; what the others hold means nothing.

    logits [S, V] float32 with largest values peak [S], finite in wanted rows; keys [S, 2].
    """
    rows, vocab = logits.shape
    limited = wanted & (filters.top_k > 0) & (filters.top_k < vocab)
    tokens, narrow = lax.cond(
        jnp.any(limited),
        lambda: _draw_narrow(logits, peak, filters, keys, limited, row_sum),
        lambda: (jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)),
    )
    wide = wanted & ~narrow
    wide_tokens = lax.cond(
        jnp.any(wide),
        lambda: _draw_wide(logits, peak, filters, keys, wide, limited & wide, row_sum),
        lambda: tokens,
    )
    return jnp.where(narrow, tokens, wide_tokens)


def _draw_narrow(
    logits: jax.Array,
    peak: jax.Array,
    filters: Filters,
    keys: jax.Array,
    limited: jax.Array,
    row_sum: RowSum,
) -> tuple[jax.Array, jax.Array]:
    """Draw among the largest logits: tokens [S], and which rows keep no token besides these."""
    count = min(CANDIDATES, logits.shape[1])
    top, ids = largest.top_k(logits, count)  # [S, count]
    place = jnp.clip(filters.top_k - 1, 0, count - 1)
    floor = jnp.take_along_axis(top, place[:, None], axis=1)  # the k-th largest
    # A dropped last candidate shows that nothing outside is kept, ties at the floor included.
    last = top[:, -1]
    complete = (last < floor[:, 0]) | (last == -jnp.inf) | (count == logits.shape[1])
    narrow = limited & (filters.top_k <= count) & complete
    winner = _race(top, ids, floor, peak, filters, keys, narrow, row_sum)
    return jnp.take_along_axis(ids, winner[:, None], axis=1)[:, 0], narrow


def _draw_wide(
    logits: jax.Array,
    peak: jax.Array,
    filters: Filters,
    keys: jax.Array,
    wide: jax.Array,
    limited: jax.Array,
    row_sum: RowSum,
) -> jax.Array:
    """Draw among the whole vocabulary: tokens [S]."""
    floor = top_k_floor(logits, filters.top_k, limited)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    return _race(logits, ids, floor[:, None], peak, filters, keys, wide, row_sum)


def top_k_floor(logits: jax.Array, top_k: jax.Array, limited: jax.Array) -> jax.Array:
    """The smallest logit [S] of [S, V] that top_k [S] keeps; -inf in rows not `limited` [S]."""
    rows, vocab = logits.shape
    floor = lax.cond(
        jnp.any(limited),
        lambda: largest.kth_largest(logits, jnp.where(limited, top_k, vocab)),
        lambda: jnp.full(rows, -jnp.inf, logits.dtype),
    )
    return jnp.where(limited, floor, -jnp.inf)


def scale_and_keep(
    logits: jax.Array, floor: jax.Array, peak: jax.Array, filters: Filters
) -> tuple[jax.Array, jax.Array]:
    """Logits [S, N] over temperature, largest 0, and which of them top_k and min_p keep."""
    # The peak goes first, so that the smallest temperature sends all others to -inf.
    scaled = (logits - peak[:, None]) / filters.temperature[:, None]
    return scaled, (logits >= floor) & (scaled >= jnp.log(filters.min_p)[:, None])


def _race(
    logits: jax.Array,
    ids: jax.Array,
    floor: jax.Array,
    peak: jax.Array,
    filters: Filters,
    keys: jax.Array,
    rows: jax.Array,
    row_sum: RowSum,
) -> jax.Array:
    """Index [S] of the winner among logits [S, N] of tokens ids [S or 1, N], floor [S, 1] and more.

    Only `rows` [S] are waited for.
    """
    scaled, kept = scale_and_keep(logits, floor, peak, filters)
    scores = jnp.where(kept, scaled + gumbel(keys, ids, DRAW), -jnp.inf)
    filtered = rows & (filters.top_p < 1.0)
    return lax.cond(
        jnp.any(filtered),
        lambda: _run_again(
            scores, jnp.where(kept, jnp.exp(scaled), 0.0), filters.top_p, filtered, row_sum
        ),
        lambda: largest.argmax(scores)[1],
    )


def _run_again(
    scores: jax.Array, weights: jax.Array, top_p: jax.Array, rows: jax.Array, row_sum: RowSum
) -> jax.Array:
    """The winner [S], after top_p in `rows`, given scores and unnormalised probabilities [S, N], 0
    if dropped.

    Sums of more terms are never smaller, whatever the rounding, so what top_p keeps is all above a
    threshold, and ties at the threshold are all in.
    """
    target = top_p * row_sum(weights)

    def run(state: _Round) -> _Round:
        _, winner = largest.argmax(jnp.where(weights > state.bar[:, None], scores, -jnp.inf))
        weight = jnp.take_along_axis(weights, winner[:, None], axis=1)
        dropped = rows & too_rare(weights, weight, target, row_sum)
        return _Round(jnp.where(dropped, weight[:, 0], state.bar), winner, dropped)

    everything = jnp.full_like(top_p, -1.0)
    start = _Round(everything, jnp.zeros(top_p.shape, jnp.int32), rows)
    # A row that is done keeps its bar, so later rounds give it the same winner.
    return lax.while_loop(lambda state: jnp.any(state.dropped), run, start).winner


def too_rare(
    weights: jax.Array, weight: jax.Array, target: jax.Array, row_sum: RowSum
) -> jax.Array:
    """Whether top_p drops tokens of that `weight` [S, 1]: those of more weight hold `target` [S],
    its share of the mass of all `weights` [S, N]. The most likely always stay."""
    above = row_sum(jnp.where(weights > weight, weights, 0.0))
    return (above > 0.0) & (above >= target)


class _Round(NamedTuple):
    """Where a race stands, one value a row: only tokens of more weight than `bar` take part."""

    bar: jax.Array
    winner: jax.Array
    dropped: jax.Array
