"""Judge a tree of drafts: several guesses for the same place, of which at most one comes true.

As in verify.py every node is drawn as if its branch were the text; the walk starts at the root and
goes on to the child that the draw names, until there is none. The tokens are those of drawing one
by one, whatever the tree.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve.core.step_batch import SamplingBatch, SamplingState, StepOutput
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling.positions import asked_logprobs, draw_tokens, per_position
from jaxserve.sampling.state import check_state
from jaxserve.sampling.verify import counts_with_drafts, settle
from pallas_kernels.row_sum.reference import row_sum_reference


def verify_tree(
    drafts: jax.Array,
    parents: jax.Array,
    logits: jax.Array,
    sampling: SamplingBatch,
    state: SamplingState,
    *,
    vocab_size: int,
    row_sum: RowSum = row_sum_reference,
) -> tuple[StepOutput, jax.Array, SamplingState]:
    """Draw each row's next tokens along a branch of its tree, and count them.

    Node 0 is the last known token; drafts [R, W - 1] int32 are the tokens of nodes 1 to W - 1, -1:
    no node. parents [R, W] int32: each node's parent, which has a smaller number; that of node 0 is
    -1. logits [R, W, V] float32 follow the nodes. Of siblings with the same token the first counts.
    Only sampling.positions[:, 0] is read; a node's position is further by its depth. The drafts
    know nothing of the noise, or were made with it, as in `verify`.

    The second result [R, W] int32 is the accepted path: the node at each depth from 0 on, -1 behind
    its end; the tokens' KV stands in the slots of these nodes. The output is that of `verify`,
    but 0 stands behind the new tokens.
    Raises ValueError while tracing when the state is narrower than vocab_size.
    """
    rows, width, _ = logits.shape
    check_state(state, vocab_size)
    raw = logits[:, :, :vocab_size].reshape(rows * width, vocab_size)
    drafts, parents = jnp.asarray(drafts), jnp.asarray(parents)
    line, exists = _lines(drafts, parents, vocab_size)
    depth = jnp.sum(line, axis=2, dtype=jnp.int32) - 1
    flat = per_position(sampling, width)
    positions = jnp.asarray(sampling.positions)[:, :1] + depth
    flat = replace(
        flat,
        active=flat.active & exists.reshape(-1),
        positions=positions.reshape(-1),
    )
    counts = counts_with_drafts(state, flat, drafts, line[:, :, 1:], vocab_size)

    drawn, sound = draw_tokens(raw, flat, counts, row_sum)
    tokens, sound = drawn.reshape(rows, width), sound.reshape(rows, width)
    accepted = _accepted(drafts, parents, line, exists, tokens, sound)
    at_depth = accepted[:, None, :] & (depth[:, None, :] == jnp.arange(width)[None, :, None])
    node = jnp.argmax(at_depth, axis=2).astype(jnp.int32)  # [R, W], by depth
    settled, state = settle(
        jnp.take_along_axis(tokens, node, axis=1),
        jnp.take_along_axis(sound, node, axis=1),
        jnp.sum(accepted, axis=1, dtype=jnp.int32) - 1,
        sampling,
        state,
    )
    logprobs = asked_logprobs(raw, drawn, flat, (accepted & sound).reshape(-1), row_sum)
    flat_node = (jnp.arange(rows)[:, None] * width + node).reshape(-1)
    logprobs = jax.tree.map(lambda leaf: leaf[flat_node], logprobs)
    settled = settled._replace(tokens=jnp.where(settled.used, settled.tokens, 0))
    return settled.output(logprobs), jnp.where(settled.used, node, -1), state


def _lines(drafts: jax.Array, parents: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """line [R, W, W]: whether the second node is the first or above it; exists [R, W]: the node and
    all above it are there."""
    width = parents.shape[1]
    nodes = jnp.arange(width)
    valid = (drafts >= 0) & (drafts < vocab_size)
    valid &= (parents[:, 1:] >= 0) & (parents[:, 1:] < nodes[1:])
    valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    up = valid[:, :, None] & (parents[:, :, None] == nodes) & (nodes > 0)[:, None]
    line = up | jnp.eye(width, dtype=bool)
    for _ in range((width - 1).bit_length()):  # each doubles the steps upwards
        counted = line.astype(jnp.float32)
        line = counted @ counted > 0.0
    return line, ~jnp.any(line & ~valid[:, None, :], axis=2)


def _accepted(
    drafts: jax.Array,
    parents: jax.Array,
    line: jax.Array,
    exists: jax.Array,
    tokens: jax.Array,
    sound: jax.Array,
) -> jax.Array:
    """Which nodes [R, W] the walk comes to: those that their parent's token names, up to node 0."""
    above = jnp.maximum(parents[:, 1:], 0)
    named = exists[:, 1:] & jnp.take_along_axis(sound, above, axis=1)
    named &= jnp.take_along_axis(tokens, above, axis=1) == drafts
    same_parent = parents[:, 1:, None] == parents[:, None, 1:]
    earlier = jnp.tri(drafts.shape[1], k=-1, dtype=bool)
    # Named siblings have the same token.
    twin = jnp.any(same_parent & earlier & named[:, None, :], axis=2)
    named = jnp.pad(named & ~twin, ((0, 0), (1, 0)), constant_values=True)
    return ~jnp.any(line & ~named[:, None, :], axis=2)
