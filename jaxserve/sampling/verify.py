"""Judge drafted tokens: one read of the weights, several tokens, and the target's distribution.

The target's logits after each draft are known before anybody knows whether the draft stands.
Position w of a row is drawn as if the drafts before it were its text; the tokens are good up to and
with the first one that differs from its draft. So they are the ones that drawing one by one would
have given, with the same noise: the draft decides only how many come at once. That holds for any
draft of which the noise of its position knows nothing, or that was made with this very noise.
Drafts with noise of their own, which their proposer drew from a distribution it can name, are
accepted more often by the classic rule (residual.py), at the price that the tokens depend on them.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.step_batch import Logprobs, SamplingBatch, SamplingState, StepOutput
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling.positions import (
    Counts,
    asked_logprobs,
    draw_tokens,
    edited_logits,
    filters_of,
    is_drawn,
    per_position,
)
from jaxserve.sampling.probabilities import probabilities
from jaxserve.sampling.random import draw_keys
from jaxserve.sampling.residual import CLASSIC, Rule, judge
from jaxserve.sampling.state import check_state, count_tokens, token_counts
from pallas_kernels.row_sum.reference import row_sum_reference


def verify(
    drafts: jax.Array,
    draft_probs: jax.Array | None,
    logits: jax.Array,
    sampling: SamplingBatch,
    state: SamplingState,
    *,
    vocab_size: int,
    row_sum: RowSum = row_sum_reference,
    coupled: jax.Array | None = None,
    rule: Rule = CLASSIC,
) -> tuple[StepOutput, SamplingState]:
    """Draw each row's next tokens, up to the first that differs from its draft; count them.

    drafts [R, W - 1] int32: a row's drafts come first, then -1. logits [R, W, V] float32: position
    w follows draft w - 1; what stands behind a row's drafts is not looked at. draft_probs None: the
    drafts are what they are (n-gram matches, greedy choices). Else [R, W - 1, vocab_size] float32:
    the distributions they were drawn from; rows `coupled` [R] bool drew them with the noise that
    the target uses here (a request with a seed), the others, and all if None, with noise of purpose
    DRAFT, and these are judged by `rule` unless they are greedy.

    Row r's new tokens are tokens[r, : num_accepted[r] + 1]. What stands after them, up to the
    column behind its last draft, was drawn as if the drafts before it held: guesses; the rest is 0.
    A row without drafts is exactly what `sample` makes of it. `ok` and what a broken row holds are
    as in `sample`, but a position after the last new token breaks nothing (0 stands there).
    Raises ValueError while tracing when the state is narrower than vocab_size.
    """
    rows, width, _ = logits.shape
    check_state(state, vocab_size)
    raw = logits[:, :, :vocab_size].reshape(rows * width, vocab_size)
    drafts = jnp.asarray(drafts)
    exists = jnp.cumprod((drafts >= 0) & (drafts < vocab_size), axis=1, dtype=jnp.int32) > 0
    flat = per_position(sampling, width)
    reached = jnp.pad(exists, ((0, 0), (1, 0)), constant_values=True)
    flat = replace(flat, active=flat.active & reached.reshape(-1))
    earlier = jnp.tri(width, width - 1, -1, dtype=bool)[None] & exists[:, None, :]
    counts = counts_with_drafts(state, flat, drafts, earlier, vocab_size)

    drawn, sound = draw_tokens(raw, flat, counts, row_sum)
    tokens, sound = drawn.reshape(rows, width), sound.reshape(rows, width)
    accepted = tokens[:, :-1] == drafts
    if draft_probs is not None and width > 1:
        classic = exists & is_drawn(flat).reshape(rows, width)[:, :-1]
        if coupled is not None:
            classic &= ~jnp.asarray(coupled)[:, None]
        tokens, accepted = lax.cond(
            jnp.any(classic),
            lambda tokens, accepted: _judged(
                drafts, draft_probs, edited_logits(raw, flat, counts), flat,
                tokens, accepted, classic, rule, row_sum,
            ),
            lambda tokens, accepted: (tokens, accepted),
            tokens,
            accepted,
        )  # fmt: skip
    run = jnp.cumprod(accepted & exists & sound[:, :-1], axis=1, dtype=jnp.int32)
    settled, state = settle(tokens, sound, jnp.sum(run, axis=1), sampling, state)
    logprobs = asked_logprobs(raw, tokens.reshape(-1), flat, settled.used.reshape(-1), row_sum)
    return settled.output(logprobs), state


class Settled(NamedTuple):
    """The new tokens of each row, first to last."""

    tokens: jax.Array  # [R, W] int32; 0 in rows that are not ok
    num_accepted: jax.Array  # [R] int32
    ok: jax.Array  # [R] bool
    used: jax.Array  # [R, W] bool: there is a new token

    def output(self, logprobs: Logprobs) -> StepOutput:
        """With the logprobs of the new tokens, leading axis R x W."""
        shape = self.tokens.shape
        return StepOutput(
            tokens=self.tokens,
            num_accepted=self.num_accepted,
            ok=self.ok,
            logprobs=jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), logprobs),
        )


def settle(
    tokens: jax.Array,
    sound: jax.Array,
    num_accepted: jax.Array,
    sampling: SamplingBatch,
    state: SamplingState,
) -> tuple[Settled, SamplingState]:
    """Count tokens [R, W] up to number num_accepted [R]; what stands behind them stays. A row whose
    last one comes from a position that is not sound [R, W] fails, and has no new tokens."""
    width = tokens.shape[1]
    active = jnp.asarray(sampling.active)
    ok = jnp.take_along_axis(sound, num_accepted[:, None], axis=1)[:, 0] | ~active
    good = active & ok
    used = good[:, None] & (jnp.arange(width)[None, :] <= num_accepted[:, None])
    tokens = jnp.where(good[:, None], tokens, 0)
    slots = jnp.repeat(jnp.asarray(sampling.slot), width)
    state = count_tokens(state, slots, tokens.reshape(-1), used.reshape(-1))
    return Settled(tokens, jnp.where(good, num_accepted, 0), ok, used), state


def counts_with_drafts(
    state: SamplingState,
    flat: SamplingBatch,
    drafts: jax.Array,
    before: jax.Array,
    vocab: int,
) -> Counts:
    """Counts of R x W positions: those of the state, and of the drafts [R, D] that stand `before`
    the position [R, W, D]. Rows without a slot count nothing."""

    def counts() -> tuple[jax.Array, jax.Array]:
        slot = jnp.asarray(flat.slot)
        in_prompt, output_counts = token_counts(state, slot, vocab)
        positions = slot.shape[0]
        counted = before.reshape(positions, -1) & (slot > 0)[:, None]
        tokens = jnp.broadcast_to(drafts[:, None, :], before.shape).reshape(positions, -1)
        place = jnp.arange(positions)[:, None], jnp.where(counted, tokens, vocab)
        return in_prompt, output_counts.at[place].add(1, mode="drop")

    return counts


def _judged(
    drafts: jax.Array,
    draft_probs: jax.Array,
    logits: jax.Array,
    flat: SamplingBatch,
    drawn: jax.Array,
    accepted: jax.Array,
    exists: jax.Array,
    rule: Rule,
    row_sum: RowSum,
) -> tuple[jax.Array, jax.Array]:
    """Tokens [R, W] and acceptance [R, W - 1] where the drafts that `exists` are judged by rule.

    logits [R x W, V]: edited; drawn [R, W] and accepted: by comparison, for all others.
    """
    rows, width = drawn.shape

    def behind_drafts(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(rows, width, *leaf.shape[1:])[:, :-1].reshape(-1, *leaf.shape[1:])

    probs = probabilities(
        behind_drafts(logits),
        jax.tree.map(behind_drafts, filters_of(flat)),
        exists.reshape(-1),
        row_sum,
    )
    keys = behind_drafts(draw_keys(flat.seed, flat.choice, flat.positions))
    shape = rows, width - 1
    judged = judge(
        drafts,
        draft_probs,
        probs.reshape(*shape, -1),
        keys.reshape(*shape, 2),
        drawn[:, :-1],
        rule,
    )
    accepted = jnp.where(exists, judged.accepted, accepted)
    in_place = jnp.where(judged.accepted, drafts, judged.replacement[:, None])
    tokens = drawn.at[:, :-1].set(jnp.where(exists, in_place, drawn[:, :-1]))
    return tokens, accepted
