"""From logits to tokens, for every mix of requests in one program.

Each request's settings are arrays, so no value of them compiles anything; what a step does not
need is skipped by conditions on the batch, so that a greedy step costs little more than an argmax.
The order is vLLM's: raw logprobs from untouched logits; then ids held back by min_tokens, logit
bias, penalties; greedy rows take the largest; the others go through temperature, min_p, top_k and
top_p (of what the two before leave) and draw.
"""

import jax
import jax.numpy as jnp

from jaxserve.core.step_batch import SamplingBatch, SamplingState, StepOutput
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling.positions import asked_logprobs, draw_tokens, per_position
from jaxserve.sampling.state import check_state, count_tokens, token_counts
from pallas_kernels.row_sum.reference import row_sum_reference


def sample(
    logits: jax.Array,
    sampling: SamplingBatch,
    state: SamplingState,
    *,
    vocab_size: int,
    row_sum: RowSum = row_sum_reference,
) -> tuple[StepOutput, SamplingState]:
    """Draw a token at each of the R x W positions, and count the rows' first tokens.

    logits [R, W, V] float32; entries from vocab_size on are padding and take no part in anything.
    Every position is drawn from its own logits with the counts of the step's start, and
    num_accepted is 0: with W > 1 the later positions are for whoever verifies drafts.
    `ok` is False in active rows that hold a NaN or +inf, or nothing that may be drawn; their tokens
    are 0 and uncounted. Inactive rows are ok and hold token 0. row_sum: the backend's, for the
    sums that normalise.
    Raises ValueError while tracing when the state is narrower than vocab_size.
    """
    rows, width, _ = logits.shape
    check_state(state, vocab_size)
    raw = logits[:, :, :vocab_size].reshape(rows * width, vocab_size)
    flat = per_position(sampling, width)

    def counts() -> tuple[jax.Array, jax.Array]:
        return token_counts(state, jnp.asarray(flat.slot), vocab_size)

    tokens, sound = draw_tokens(raw, flat, counts, row_sum)
    logprobs = asked_logprobs(raw, tokens, flat, sound, row_sum)
    tokens = tokens.reshape(rows, width)
    ok = jnp.all((sound | ~flat.active).reshape(rows, width), axis=1)
    active = jnp.asarray(sampling.active)
    state = count_tokens(state, jnp.asarray(sampling.slot), tokens[:, 0], active & ok)
    output = StepOutput(
        tokens=tokens,
        num_accepted=jnp.zeros(rows, jnp.int32),
        ok=ok,
        logprobs=jax.tree.map(lambda leaf: leaf.reshape(rows, width, *leaf.shape[1:]), logprobs),
    )
    return output, state
