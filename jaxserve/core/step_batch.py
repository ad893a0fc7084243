"""The data one step reads and returns (design section 4).

Dimensions: R rows (decode rows first, then prefill rows), T flat tokens, W = width (tokens a
decode row owns: 1, or k + 1 with speculation), G table groups (kv_layout.py), P pages a row,
V vocabulary.
All arrays are numpy on the host and are handed to the jitted step as they are; the step reads
them without a copy on CPU, so a batch is never changed after dispatch.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray

MAX_SUPPRESS_IDS = 64  # EOS and stop ids a row may hold back until min_tokens are out


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens", "positions", "row_of_token", "prev_row", "write_slot", "query_starts",
        "query_lens", "kv_lens", "page_table", "adapter_slot", "state_slot", "sample_at",
    ],
    meta_fields=["decode_rows", "width"],
)  # fmt: skip
@dataclass(frozen=True)
class StepBatch:
    """One step's work, int32 throughout. Padding writes nothing and attends to nothing.

    Each table group keeps a token under a page of its own, so there is a write slot for each. The
    first decode_rows rows own `width` tokens each: row r owns tokens [r * W, (r + 1) * W).
    Prefill rows follow; row r's chunk is tokens [query_starts[r], query_starts[r] + query_lens[r]).
    """

    tokens: Array  # [T] token ids
    positions: Array  # [T] index of the token in its request
    row_of_token: Array  # [T] R for padding
    prev_row: Array  # [T] >= 0: token and advance come from that row of the previous output
    write_slot: Array  # [G, T] page * page_size + offset; -1: write nothing
    query_starts: Array  # [R] first flat token of the row
    query_lens: Array  # [R] tokens of the row in this step; 0: padded row
    kv_lens: Array  # [R] tokens of KV the row has after this step's writes
    page_table: Array  # [G, R, P] page ids; 0 (never allocated): padding, or out of the window
    adapter_slot: Array  # [R] LoRA adapter; 0: none
    state_slot: Array  # [R] recurrent state; 0: none
    sample_at: Array  # [R, W] flat token indices whose logits are wanted
    decode_rows: int
    width: int

    @property
    def num_rows(self) -> int:
        return self.query_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def prefill_tokens(self) -> int:
        return self.num_tokens - self.decode_rows * self.width


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "active", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "bias_ids", "bias_values", "suppress_ids",
        "suppress_until", "seed", "choice", "positions", "slot", "num_logprobs",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclass(frozen=True)
class SamplingBatch:
    """How to sample each row: one array each, never static, so no value causes a compile."""

    active: Array  # [R] bool: the row's sample is real (not padding, not an inner prefill chunk)
    temperature: Array  # [R] float32; 0: greedy
    top_k: Array  # [R] int32; 0: off
    top_p: Array  # [R] float32; 1: off
    min_p: Array  # [R] float32; 0: off
    repetition_penalty: Array  # [R] float32; 1: off
    presence_penalty: Array  # [R] float32; 0: off
    frequency_penalty: Array  # [R] float32; 0: off
    bias_ids: Array  # [R, MAX_LOGIT_BIAS] int32; -1: padding
    bias_values: Array  # [R, MAX_LOGIT_BIAS] float32
    suppress_ids: Array  # [R, MAX_SUPPRESS_IDS] int32 ids that may not be drawn yet; -1: padding
    suppress_until: Array  # [R] int32: they are masked while position < suppress_until
    seed: Array  # [R, 2] uint32: low and high word
    choice: Array  # [R] int32: which of the n choices of its request
    positions: Array  # [R, W] int32: index in its request of the token to be drawn
    slot: Array  # [R] int32 row of SamplingState; 0: the row uses no counts
    num_logprobs: Array  # [R] int32; -1: none asked for


@partial(
    jax.tree_util.register_dataclass, data_fields=["in_prompt", "output_counts"], meta_fields=[]
)
@dataclass(frozen=True)
class SamplingState:
    """Token counts for penalties, per row slot; slot 0 is a dummy. Rebuilt after a preemption."""

    in_prompt: Array  # [slots, V] bool
    output_counts: Array  # [slots, V] int32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_logprob", "token_rank", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Logprobs:
    """Of the raw distribution (before temperature, penalties, bias and filters)."""

    token_logprob: Array  # [R, W] float32
    token_rank: Array  # [R, W] int32, 1 = most likely
    top_ids: Array  # [R, W, MAX_LOGPROBS] int32, most likely first
    top_logprobs: Array  # [R, W, MAX_LOGPROBS] float32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "num_accepted", "ok", "logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepOutput:
    """What a step says. Row r's new tokens are tokens[r, : num_accepted[r] + 1]; nobody may take
    for text what stands behind them (see `sampling.verify`)."""

    tokens: Array  # [R, W] int32
    num_accepted: Array  # [R] int32 drafts accepted; 0 without speculation
    ok: Array  # [R] bool; False: the row's logits were NaN and the row alone failed
    logprobs: Logprobs  # meaningful only where num_logprobs >= 0


def resolve_previous(
    batch: StepBatch, last_tokens: jax.Array, last_accepted: jax.Array, page_size: int
) -> StepBatch:
    """Replace what only the previous step's output knows, on the device.

    last_tokens [rows, W] and last_accepted [rows] are the previous step's tokens and num_accepted.
    For tokens with prev_row >= 0 the host left positions and kv_lens as they were before that
    step's tokens were known; the row advanced by num_accepted + 1. Its token is the last new one,
    and its write slots follow from the page tables. Tokens with prev_row -1 stand as they are.
    """
    source = jnp.maximum(batch.prev_row, 0)
    from_previous = batch.prev_row >= 0
    accepted = last_accepted[source]
    positions = jnp.where(from_previous, batch.positions + accepted + 1, batch.positions)
    row = jnp.minimum(batch.row_of_token, batch.num_rows - 1)
    page = jnp.asarray(batch.page_table)[:, row, positions // page_size]
    slot = page * page_size + positions % page_size
    advance = jnp.zeros(batch.num_rows, jnp.int32)
    advance = advance.at[row].max(jnp.where(from_previous, accepted + 1, 0))
    return replace(
        batch,
        tokens=jnp.where(from_previous, last_tokens[source, accepted], batch.tokens),
        positions=positions,
        write_slot=jnp.where(from_previous, slot, batch.write_slot),
        kv_lens=batch.kv_lens + advance,
    )
