"""Draw drafts from a draft's logits so that `verify` can judge them."""

import jax
import jax.numpy as jnp

from jaxserve.core.step_batch import SamplingBatch
from jaxserve.sampling import largest
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling.positions import draw_tokens, filters_of, is_drawn, per_position
from jaxserve.sampling.probabilities import probabilities
from jaxserve.sampling.random import DRAFT, DRAW, draw_keys, gumbel
from pallas_kernels.row_sum.reference import row_sum_reference


def draft(
    logits: jax.Array,
    sampling: SamplingBatch,
    coupled: jax.Array,
    *,
    vocab_size: int,
    row_sum: RowSum = row_sum_reference,
) -> tuple[jax.Array, jax.Array]:
    """One draft per row [R] int32, and the distribution it is from [R, vocab_size] float32.

    logits [R, V] float32 of the draft model; sampling: the rows' settings, positions [R, 1] those
    of the drafts. Temperature and filters are the target's, so that the two distributions are
    close; penalties, bias and held-back ids are left to the target. Rows `coupled` [R] use the
    noise that the target will use at this position, the others noise of their own. Greedy rows take
    the largest, with probability 1; so do rows with a NaN, whose draft is anything.
    """
    logits = logits[:, :vocab_size]
    flat = per_position(sampling, 1)
    _, best = largest.argmax(logits)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    drawn = is_drawn(flat)
    probs = probabilities(logits, filters_of(flat), drawn, row_sum)
    purpose = jnp.where(jnp.asarray(coupled), DRAW, DRAFT)[:, None]
    keys = draw_keys(flat.seed, flat.choice, flat.positions)
    noise = gumbel(keys, ids, purpose)
    scores = jnp.where(probs > 0.0, jnp.log(probs) + noise, -jnp.inf)
    peak, winner = largest.argmax(scores)
    drawn &= peak > -jnp.inf
    tokens = jnp.where(drawn, winner, best)
    certain = (ids == best[:, None]).astype(jnp.float32)
    return tokens, jnp.where(drawn[:, None], probs, certain)


def draw_ahead(
    logits: jax.Array,
    sampling: SamplingBatch,
    vocab_size: int,
    row_sum: RowSum = row_sum_reference,
) -> jax.Array:
    """Drafts [R, W] int32 that are plain guesses: what the target would draw at positions [R, W]
    if these were its logits [R, W, V] float32, with its settings and its noise.

    But without penalties, which the rows must not have: nobody counts tokens for drafts. -inf is
    never drawn. A position whose logits hold a NaN gets token 0.
    """
    rows, width, _ = logits.shape
    raw = logits[:, :, :vocab_size].reshape(rows * width, vocab_size)

    def none_counted() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(raw.shape, bool), jnp.zeros(raw.shape, jnp.int32)

    tokens, _ = draw_tokens(raw, per_position(sampling, width), none_counted, row_sum)
    return tokens.reshape(rows, width)
