"""Log-probabilities of the raw distribution: of given tokens (drawn ones, or those of a prompt) and
of the most likely ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.step_batch import Logprobs
from jaxserve.sampling import largest
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling_params import MAX_LOGPROBS

MAX_LOGITS_BYTES = 32 << 20  # of the logits of one piece of `prompt_logprobs`


def raw_logprobs(logits: jax.Array, tokens: jax.Array, row_sum: RowSum) -> Logprobs:
    """Logprobs with leading axis S, from raw logits [S, V] and drawn tokens [S].

    A token's rank is 1 plus the number of strictly more likely tokens. Impossible tokens have
    -inf. Where fewer than MAX_LOGPROBS tokens are possible, the rest of top_ids is -1.
    """
    chosen, log_total = given_logits(logits, tokens, row_sum)
    more_likely = jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)
    k = min(MAX_LOGPROBS, logits.shape[1])
    top, ids = largest.top_k(logits, k)
    missing = ((0, 0), (0, MAX_LOGPROBS - k))
    return Logprobs(
        token_logprob=(chosen - log_total)[:, 0],
        token_rank=more_likely + 1,
        top_ids=jnp.pad(jnp.where(top > -jnp.inf, ids, -1), missing, constant_values=-1),
        top_logprobs=jnp.pad(top - log_total, missing, constant_values=-jnp.inf),
    )


def given_logits(
    logits: jax.Array, tokens: jax.Array, row_sum: RowSum
) -> tuple[jax.Array, jax.Array]:
    """The logits of tokens [S] in logits [S, V], and the log of the sum of all exponentials: [S, 1]
    twice. A logit less that is its log-probability."""
    peak = jnp.max(logits, axis=1, keepdims=True)
    log_total = jnp.log(row_sum(jnp.exp(logits - peak)))[:, None] + peak
    return jnp.take_along_axis(logits, tokens[:, None], axis=1), log_total


def rows_at_once(num_rows: int, words: int, most_bytes: int) -> int:
    """Rows whose logits fit into so many bytes: all of them, or a power of two, at least one.

    words: logits a row has, of all models together.
    """
    fitting = most_bytes // (4 * words)
    if fitting >= num_rows:
        return num_rows
    return 1 << (max(fitting, 1).bit_length() - 1)


def prompt_logprobs(
    hidden: jax.Array,
    targets: jax.Array,
    unembed: Callable[[jax.Array], jax.Array],
    vocab_size: int,
    row_sum: RowSum,
) -> Logprobs:
    """Logprobs with leading axis T, of the token that follows each of the hidden states [T, E].

    targets [T] int32: that token; -1: nobody asks, and what stands there means nothing. unembed:
    hidden [S, E] -> logits [S, at least vocab_size]. Logits of all T rows would be large (1024 rows
    of 262,144 words: 1 GB), so they are made a piece at a time, and none where nobody asks.
    """
    total = hidden.shape[0]
    rows = rows_at_once(total, vocab_size, MAX_LOGITS_BYTES)
    short = -total % rows
    hidden = jnp.pad(hidden, ((0, short), (0, 0))).reshape(-1, rows, hidden.shape[1])
    targets = jnp.pad(jnp.asarray(targets), (0, short), constant_values=-1).reshape(-1, rows)

    def piece(args: tuple[jax.Array, jax.Array]) -> Logprobs:
        hidden, targets = args
        return lax.cond(
            jnp.any(targets >= 0),
            lambda: raw_logprobs(unembed(hidden)[:, :vocab_size], jnp.maximum(targets, 0), row_sum),
            lambda: no_logprobs(rows),
        )

    pieces = lax.map(piece, (hidden, targets))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:total], pieces)


def no_logprobs(rows: int) -> Logprobs:
    """Zeros of the same shapes, for steps in which nobody asked."""
    return Logprobs(
        token_logprob=jnp.zeros(rows, jnp.float32),
        token_rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )
