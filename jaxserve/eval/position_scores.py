"""From logits to a few numbers a position, on the device.

Logits of a whole chunk are large (512 positions of Gemma's 262,144 words: 537 MB), so hidden
states are turned into logits a piece at a time, and only the numbers leave the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.ops import Ops
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.sampling.draws import RowSum
from jaxserve.sampling.logprobs import given_logits, rows_at_once

MAX_LOGITS_BYTES = 64 << 20  # of the logits of one piece, of both models together


@dataclass(frozen=True)
class Head:
    """What turns a model's hidden states into logits. All fields are static.

    vocab_size: ids that may be drawn; logits past it are padding, as in the sampler.
    """

    model: ModelDef
    config: Config
    ops: Ops
    vocab_size: int

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """[S, vocab_size] float32 of hidden [S, E]."""
        logits = self.model.unembed(self.config, params, hidden, self.ops)
        return logits[:, : self.vocab_size]


@partial(
    jax.tree_util.register_dataclass, data_fields=["logprob", "best", "margin"], meta_fields=[]
)
@dataclass(frozen=True)
class Scores:
    """What a model says at S positions, natural logarithms.

    logprob [S]: of the token that follows; best [S] int32: the likeliest token, the lowest id among
    equals; margin [S]: how far its logit lies above the second one's.
    """

    logprob: jax.Array | np.ndarray
    best: jax.Array | np.ndarray
    margin: jax.Array | np.ndarray


def piece_rows(chunk_tokens: int, words: int) -> int:
    """Positions whose logits are made at once: a power of two, or a whole chunk.

    words: logits a position has, of all models together.
    """
    return rows_at_once(chunk_tokens, words, MAX_LOGITS_BYTES)


def pieces(first: int, count: int, rows: int, total: int) -> Iterator[tuple[int, slice]]:
    """Pieces of `rows` out of `total` rows that cover rows first to first + count - 1.

    Yields (where the piece starts, which of its rows are new); all pieces lie within the total.
    """
    at, end = first, first + count
    while at < end:
        start = min(at, total - rows)
        stop = min(start + rows, end)
        yield start, slice(at - start, stop - start)
        at = stop


@partial(jax.jit, static_argnums=(0, 4))
def score_piece(
    head: Head, params: Params, hidden: jax.Array, start_and_targets: jax.Array, rows: int
) -> Scores:
    """Scores of `rows` rows of hidden [T, E].

    start_and_targets int32 [1 + rows]: the first row, then the token that follows each.
    """
    return _scores(*_piece(head, params, hidden, start_and_targets, rows), head.ops.row_sum)


@partial(jax.jit, static_argnums=(0, 3, 7))
def compare_piece(
    head: Head,
    params: Params,
    hidden: jax.Array,
    other_head: Head,
    other_params: Params,
    other_hidden: jax.Array,
    start_and_targets: jax.Array,
    rows: int,
) -> tuple[Scores, Scores, jax.Array]:
    """Scores of both models, and the KL divergence [rows] from the other to this one, in nats:
    what is lost by saying p where p_other is meant."""
    own = _piece(head, params, hidden, start_and_targets, rows)
    other = _piece(other_head, other_params, other_hidden, start_and_targets, rows)
    return (
        _scores(*own, head.ops.row_sum),
        _scores(*other, other_head.ops.row_sum),
        _divergence(own[0], other[0]),
    )


def _divergence(logits: jax.Array, other_logits: jax.Array) -> jax.Array:
    """KL [S]: the sum over words of p_other (log p_other - log p).

    p - p_other, whose sum is 0, is added to each term: then none is below 0, and the divergence of
    nearly equal distributions is not lost among rounding errors of terms of both signs.
    """
    log_p, log_other = jax.nn.log_softmax(logits, axis=1), jax.nn.log_softmax(other_logits, axis=1)
    p, p_other = jnp.exp(log_p), jnp.exp(log_other)
    d = jnp.where(p_other > 0, log_p - log_other, 1.0)  # 0 * log(0) is 0
    near = p_other * d * d * (1 / 2 + d * (1 / 6 + d / 24))  # of p_other (exp(d) - 1 - d)
    return jnp.sum(jnp.where(jnp.abs(d) < 1e-2, near, p - p_other - p_other * d), axis=1)


def _piece(
    head: Head, params: Params, hidden: jax.Array, start_and_targets: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Logits [rows, vocab_size] of the piece, and the token that follows each of its rows."""
    part = jax.lax.dynamic_slice_in_dim(hidden, start_and_targets[0], rows)
    return head.logits(params, part), start_and_targets[1:]


def _scores(logits: jax.Array, targets: jax.Array, row_sum: RowSum) -> Scores:
    best = jnp.argmax(logits, axis=1)
    is_best = jnp.arange(logits.shape[1]) == best[:, None]
    first = jnp.max(logits, axis=1)
    second = jnp.max(jnp.where(is_best, -jnp.inf, logits), axis=1)
    chosen, log_total = given_logits(logits, targets, row_sum)
    return Scores((chosen - log_total)[:, 0], best.astype(jnp.int32), first - second)
