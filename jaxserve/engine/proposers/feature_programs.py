"""The programs of heads that go on token by token from the target's features (EAGLE, MTP).

A pair, the feature of position i and the token at i + 1, is run as position i and gives a feature
of position i + 1, from whose logits the token at i + 2 is drawn (models/drafts/base.py). Batches
are built of tokens, as for a model, and turned into pairs here.

catch_up: pairs of known tokens, for their keys and values.
propose: the last such pairs of each row, then the draft's own features and drafts, in a loop: all
drafts of a call in one program, since each alone takes less time than the host needs between two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.features import read_features
from jaxserve.core.kv_pool import KVPool
from jaxserve.core.mesh import pool_shardings, replicated
from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import Program
from jaxserve.core.step_batch import SamplingBatch, StepBatch
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.models.drafts.base import FeatureDraft
from jaxserve.sampling.drafting import draw_ahead


@dataclass(frozen=True)
class Target:
    """The target, of which heads read embeddings and features and mostly use the unembedding."""

    model: ModelDef
    config: Config
    ops: Ops
    vocab_size: int

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 [S, V] of hidden [S, E]."""
        return self.model.unembed(self.config, params, hidden, self.ops)


@dataclass(frozen=True)
class FeaturePrograms:
    """All fields are static: equal programs share traces. ops: the draft's, over its own pool.

    num_drafts: of a row in a call at most. `params` are the target's and `own` the draft's;
    `features` is the array of the target's pool.
    """

    target: Target
    draft: FeatureDraft
    config: Config
    ops: Ops
    page_size: int
    num_drafts: int
    mesh: Mesh

    def catch_up(
        self, params: Params, own: Params, pool: KVPool, features: jax.Array, batch: StepBatch
    ) -> KVPool:
        """The draft's pool with the keys and values of the batch's tokens."""
        return self._known(params, own, pool, features, batch)[2]

    def propose(
        self,
        params: Params,
        own: Params,
        pool: KVPool,
        features: jax.Array,
        batch: StepBatch,
        sampling: SamplingBatch,
        wanted: jax.Array,
    ) -> tuple[jax.Array, KVPool]:
        """Drafts [R, num_drafts] int32, of which row r has wanted[r] (others hold anything).

        batch: the last tokens of each row; sampling: positions [R, 1] of the first draft.
        """
        pairs, hidden, pool = self._known(params, own, pool, features, batch)
        last = hidden[jnp.asarray(batch.sample_at)[:, -1]]  # [R, E]
        first = self._draw(params, own, last, sampling, 0)
        drafts = jnp.zeros((batch.num_rows, self.num_drafts), jnp.int32).at[:, 0].set(first)
        wanted = jnp.asarray(wanted)
        known = jnp.asarray(pairs.kv_lens)

        def step(
            index: jax.Array, carry: tuple[jax.Array, jax.Array, KVPool]
        ) -> tuple[jax.Array, jax.Array, KVPool]:
            drafts, last, pool = carry
            token = jax.lax.dynamic_index_in_dim(drafts, index - 1, axis=1, keepdims=False)
            one = self._next_pair(pairs, token, known + index - 1, wanted > index)
            last, pool = self._forward(params, own, last, one, pool)
            drawn = self._draw(params, own, last, sampling, index)
            return drafts.at[:, index].set(drawn), last, pool

        drafts, _, pool = jax.lax.fori_loop(1, jnp.max(wanted), step, (drafts, last, pool))
        return drafts, pool

    def _known(
        self, params: Params, own: Params, pool: KVPool, features: jax.Array, batch: StepBatch
    ) -> tuple[StepBatch, jax.Array, KVPool]:
        """The batch as pairs, the features [T, E] that they give, and the pool with them."""
        pairs = self._as_pairs(batch)
        captured = read_features(features, pairs.write_slot[0])
        fused = self.draft.fuse(self.config, own, captured, self.ops)
        hidden, pool = self._forward(params, own, fused, pairs, pool)
        return pairs, hidden, pool

    def _forward(
        self, params: Params, own: Params, features: jax.Array, pairs: StepBatch, pool: KVPool
    ) -> tuple[jax.Array, KVPool]:
        embeddings = self.target.ops.embed(params["embed"], pairs.tokens)
        return self.draft.forward(self.config, own, embeddings, features, pairs, pool, self.ops)

    def _as_pairs(self, batch: StepBatch) -> StepBatch:
        """A batch of tokens, none of them its request's first, each at the position before it."""
        real = jnp.asarray(batch.row_of_token) < batch.num_rows
        positions = jnp.where(real, jnp.asarray(batch.positions) - 1, 0)
        row = jnp.minimum(jnp.asarray(batch.row_of_token), batch.num_rows - 1)
        slot = self._slots(batch, row, positions)
        return replace(
            batch,
            tokens=jnp.asarray(batch.tokens),
            positions=positions,
            write_slot=jnp.where(real, slot, -1)[None],
            kv_lens=jnp.maximum(jnp.asarray(batch.kv_lens) - 1, 0),
        )

    def _slots(self, batch: StepBatch, row: jax.Array, positions: jax.Array) -> jax.Array:
        page = jnp.asarray(batch.page_table)[0][row, positions // self.page_size]
        return page * self.page_size + positions % self.page_size

    def _next_pair(
        self, pairs: StepBatch, token: jax.Array, position: jax.Array, live: jax.Array
    ) -> StepBatch:
        """A decode step of one token [R] a row, for the rows that are `live` [R]."""
        R = pairs.num_rows
        row = jnp.arange(R, dtype=jnp.int32)
        live &= jnp.asarray(pairs.query_lens) > 0
        position = jnp.where(live, position, 0)
        return replace(
            pairs,
            tokens=token,
            positions=position,
            row_of_token=jnp.where(live, row, R),
            prev_row=jnp.full(R, -1, jnp.int32),
            write_slot=jnp.where(live, self._slots(pairs, row, position), -1)[None],
            query_starts=row,
            query_lens=live.astype(jnp.int32),
            kv_lens=jnp.where(live, position + 1, 0),
            sample_at=row[:, None],
            decode_rows=R,
            width=1,
        )

    def _draw(
        self,
        params: Params,
        own: Params,
        features: jax.Array,
        sampling: SamplingBatch,
        index: jax.Array | int,
    ) -> jax.Array:
        """Each row's draft [R] number `index`, from features [R, E]."""

        def unembed(hidden: jax.Array) -> jax.Array:
            return self.target.logits(params, hidden)

        logits = self.draft.logits(self.config, own, features, unembed, self.ops)
        words = jnp.arange(logits.shape[1], dtype=jnp.int32)
        ids = self.draft.target_ids(self.config, own, words)
        if ids is not words:  # words of its own: what it cannot say is not drawn
            everything = (logits.shape[0], self.target.vocab_size)
            logits = jnp.full(everything, -jnp.inf).at[:, ids].set(logits)
        now = replace(sampling, positions=jnp.asarray(sampling.positions) + index)
        return draw_ahead(logits[:, None], now, self.target.vocab_size, self.target.ops.row_sum)[
            :, 0
        ]

    # The arguments below are arrays or shapes. The draft's pool is written in place.

    def catch_up_program(
        self, params: Params, own: Params, pool: KVPool, features: Any, batch: StepBatch
    ) -> Program:
        """`catch_up` for this batch's shape."""
        places = pool_shardings(self.mesh, pool)
        args = (params, own, pool, features, batch)
        return self._program("draft_catch_up", self.catch_up, args, places)

    def propose_program(
        self,
        params: Params,
        own: Params,
        pool: KVPool,
        features: Any,
        batch: StepBatch,
        sampling: SamplingBatch,
        wanted: Any,
    ) -> Program:
        """`propose` for this number of rows."""
        places = (replicated(self.mesh), pool_shardings(self.mesh, pool))
        args = (params, own, pool, features, batch, sampling, wanted)
        return self._program("draft_propose", self.propose, args, places)

    def _program(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], places: Any
    ) -> Program:
        sizes = (self.page_size, self.num_drafts)
        return Program(
            name,
            function,
            args,
            donated=range(2, 3),
            result=places,
            shardings=places,
            identity=(self.target, self.draft, self.config, self.ops, sizes),
            keep=self.mesh.size == 1,
        )
