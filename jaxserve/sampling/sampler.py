"""From logits to tokens, for every mix of requests in one program.

Each request's settings are arrays, so no value of them compiles anything; what a step does not
need is skipped by conditions on the batch, so that a greedy step costs little more than an argmax.
The order is vLLM's: raw logprobs from untouched logits; then ids held back by min_tokens, logit
bias, penalties; greedy rows take the largest; the others go through temperature, min_p, top_k and
top_p (of what the two before leave) and draw.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.step_batch import SamplingBatch, SamplingState, StepOutput
from jaxserve.sampling import largest
from jaxserve.sampling.draws import SMALLEST_TEMPERATURE, Filters, RowSum, draw
from jaxserve.sampling.logprobs import no_logprobs, raw_logprobs
from jaxserve.sampling.masks import add_bias, suppress
from jaxserve.sampling.penalties import penalise
from jaxserve.sampling.random import draw_keys
from jaxserve.sampling.state import count_tokens
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
    if state.output_counts.shape[1] < vocab_size:
        raise ValueError(
            f"the sampling state counts {state.output_counts.shape[1]} tokens, the vocabulary has "
            f"{vocab_size}; make the state with the model's vocabulary size"
        )
    raw = logits[:, :, :vocab_size].reshape(rows * width, vocab_size)
    flat = _per_position(sampling, width)
    real = flat.active
    # A sum, since XLA:CPU's maximum passes some NaN by. From here on a row with NaN or +inf counts
    # as idle, so that it cannot make the others pay for its settings.
    flat = replace(flat, active=real & (jnp.sum(raw, axis=1) < jnp.inf))
    edits = _edits(flat)
    drawn = flat.active & (flat.temperature >= SMALLEST_TEMPERATURE)
    plain = ~jnp.any(drawn | edits.held | edits.biased | edits.penalised)
    tokens, finite = lax.cond(
        plain,
        lambda: _largest(raw),
        lambda: _choose(_edit(raw, edits, flat, state), flat, drawn, row_sum),
    )
    sound = flat.active & finite
    tokens = jnp.where(sound, tokens, 0)
    asked = sound & (flat.num_logprobs >= 0)
    logprobs = lax.cond(
        jnp.any(asked),
        lambda: raw_logprobs(raw, tokens, row_sum),
        lambda: no_logprobs(rows * width),
    )
    tokens = tokens.reshape(rows, width)
    ok = jnp.all((sound | ~real).reshape(rows, width), axis=1)
    active = jnp.asarray(sampling.active)
    state = count_tokens(state, jnp.asarray(sampling.slot), tokens[:, 0], active & ok)
    output = StepOutput(
        tokens=tokens,
        num_accepted=jnp.zeros(rows, jnp.int32),
        ok=ok,
        logprobs=jax.tree.map(lambda leaf: leaf.reshape(rows, width, *leaf.shape[1:]), logprobs),
    )
    return output, state


def _per_position(sampling: SamplingBatch, width: int) -> SamplingBatch:
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


def _edit(logits: jax.Array, edits: _Edits, flat: SamplingBatch, state: SamplingState) -> jax.Array:
    """Logits [S, V] after held-back ids, bias and penalties."""
    vocab = logits.shape[1]

    def penalised(logits: jax.Array) -> jax.Array:
        return penalise(
            logits,
            jnp.asarray(state.in_prompt)[flat.slot, :vocab],
            jnp.asarray(state.output_counts)[flat.slot, :vocab],
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
    filters = Filters(
        temperature=jnp.maximum(flat.temperature, SMALLEST_TEMPERATURE),
        top_k=flat.top_k,
        top_p=flat.top_p,
        min_p=flat.min_p,
    )
    wanted = drawn & finite

    def drawn_tokens() -> jax.Array:
        keys = draw_keys(flat.seed, flat.choice, flat.positions)
        return jnp.where(wanted, draw(logits, peak, filters, keys, wanted, row_sum), best)

    return lax.cond(jnp.any(wanted), drawn_tokens, lambda: best), finite
