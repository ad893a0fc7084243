"""Log-probabilities of the raw distribution: of the drawn token and of the most likely ones."""

import jax
import jax.numpy as jnp

from jaxserve.core.step_batch import Logprobs
from jaxserve.sampling import largest
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling_params import MAX_LOGPROBS


def raw_logprobs(logits: jax.Array, tokens: jax.Array, row_sum: RowSum) -> Logprobs:
    """Logprobs with leading axis S, from raw logits [S, V] and drawn tokens [S].

    A token's rank is 1 plus the number of strictly more likely tokens. Impossible tokens have
    -inf. Where fewer than MAX_LOGPROBS tokens are possible, the rest of top_ids is -1.
    """
    peak = jnp.max(logits, axis=1, keepdims=True)
    log_total = jnp.log(row_sum(jnp.exp(logits - peak)))[:, None] + peak
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
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


def no_logprobs(rows: int) -> Logprobs:
    """Zeros of the same shapes, for steps in which nobody asked."""
    return Logprobs(
        token_logprob=jnp.zeros(rows, jnp.float32),
        token_rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )
