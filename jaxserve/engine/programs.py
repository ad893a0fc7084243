"""The programs of an engine: one to three per bucket and a few for rare events, ahead of time.

Of a decode bucket:
decode: tokens -> hidden states -> tokens, one or several times; pool and sampling state donated.
verify: the same for rows of a token and drafts of the next ones, once.
One call, because what the host does for each call weighs most where steps are short.
Of a mixed bucket:
forward: tokens -> hidden states at the sampled positions, and of all prefill tokens; pool donated.
sample: hidden -> logits -> tokens, sampling state donated.
score: hidden states of prefill tokens -> logprobs of the prompt tokens that follow, where wanted.
Separate calls, so that sampling and scoring never multiply the forward shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.features import FeatureForm, captured, write_features
from jaxserve.core.kv_pool import KVPool, shapes_of_pages
from jaxserve.core.mesh import pool_shardings, replicated
from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import Program
from jaxserve.core.step_batch import (
    Logprobs,
    SamplingBatch,
    SamplingState,
    StepBatch,
    StepOutput,
    resolve_previous,
)
from jaxserve.engine.page_programs import (
    BATCH,
    copy_pages,
    read_pages,
    scrub_pages,
    write_pages,
)
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.sampling import sample, set_slot
from jaxserve.sampling.logprobs import no_logprobs, prompt_logprobs
from jaxserve.sampling.verify import verify


@dataclass(frozen=True)
class LastOutput:
    """The previous step's result, on the device: tokens [max rows, max_draws] and num_accepted
    [max rows].

    Padded to the largest bucket, so that its shape does not multiply the programs.
    """

    tokens: jax.Array
    num_accepted: jax.Array


jax.tree_util.register_dataclass(LastOutput, ["tokens", "num_accepted"], [])

_LAST = LastOutput(0, 0)  # of which only the structure counts
_LOGPROBS = Logprobs(0, 0, 0, 0)
_OUTPUT = StepOutput(0, 0, 0, _LOGPROBS)


@dataclass(frozen=True)
class Programs:
    """The step functions before compilation. All fields are static: equal programs share traces.

    max_steps: decode steps that one call may run. max_draws: tokens that a row may draw in a call.
    features: what every step keeps of its tokens in the pool, for a draft.
    """

    model: ModelDef
    config: Config
    ops: Ops
    vocab_size: int
    page_size: int
    max_rows: int
    max_steps: int
    max_draws: int
    mesh: Mesh
    features: FeatureForm | None = None

    def forward(
        self, params: Params, pool: KVPool, batch: StepBatch, last: LastOutput
    ) -> tuple[jax.Array, jax.Array | None, KVPool]:
        """hidden [R, W, E] at batch.sample_at, hidden [prefill tokens, E] (None in a decode step),
        and the pool with this step's keys and values."""
        batch = resolve_previous(batch, last.tokens, last.num_accepted, self.page_size)
        hidden, pool = self._run(params, batch, pool)
        count = batch.prefill_tokens
        return hidden[batch.sample_at], hidden[-count:] if count else None, pool

    def _run(self, params: Params, batch: StepBatch, pool: KVPool) -> tuple[jax.Array, KVPool]:
        """The model's hidden states [T, E]; their features go to the pool, where it keeps any."""
        hidden, taps, pool = self.model.forward(self.config, params, batch, pool, self.ops)
        form = self.features
        if form is None or pool.features is None:
            return hidden, pool
        slots = jnp.asarray(batch.write_slot)[form.table]
        values = captured(form.taps, hidden, taps)
        return hidden, replace(pool, features=write_features(pool.features, slots, values))

    def sample(
        self, params: Params, hidden: jax.Array, sampling: SamplingBatch, state: SamplingState
    ) -> tuple[StepOutput, LastOutput, SamplingState]:
        """Draw each row's token; also return it padded, as the next step's `last`."""
        R, W, E = hidden.shape
        logits = self.model.unembed(self.config, params, hidden.reshape(R * W, E), self.ops)
        output, state = sample(
            logits.reshape(R, W, -1),
            sampling,
            state,
            vocab_size=self.vocab_size,
            row_sum=self.ops.row_sum,
        )
        return output, self._as_last(output), state

    def _as_last(self, output: StepOutput) -> LastOutput:
        rows, draws = output.tokens.shape
        pad = self.max_rows - rows
        return LastOutput(
            jnp.pad(output.tokens, ((0, pad), (0, self.max_draws - draws))),
            jnp.pad(output.num_accepted, (0, pad)),
        )

    def decode(
        self,
        params: Params,
        pool: KVPool,
        state: SamplingState,
        batch: StepBatch,
        last: LastOutput,
        sampling: SamplingBatch,
        steps: jax.Array,
    ) -> tuple[StepOutput, LastOutput, KVPool, SamplingState]:
        """Run decode rows of one token `steps` times, each time with the token drawn last.

        steps: int32, at most max_steps. The output has max_steps columns, of which the first
        `steps` were drawn; num_accepted is steps - 1. A row is ok if it was in every step.
        """
        rows = batch.num_rows
        batch = resolve_previous(batch, last.tokens, last.num_accepted, self.page_size)
        real = jnp.asarray(batch.query_lens) > 0
        follows = jnp.where(real, jnp.arange(rows, dtype=jnp.int32), -1)

        def step(
            index: jax.Array, carry: tuple[KVPool, SamplingState, StepBatch, StepOutput]
        ) -> tuple[KVPool, SamplingState, StepBatch, StepOutput]:
            pool, state, batch, outputs = carry
            hidden, pool = self._run(params, batch, pool)
            now = replace(sampling, positions=jnp.asarray(sampling.positions) + index)
            output, _, state = self.sample(params, hidden[batch.sample_at], now, state)
            batch = resolve_previous(
                replace(batch, prev_row=follows), output.tokens, output.num_accepted, self.page_size
            )
            batch = replace(batch, prev_row=jnp.full_like(follows, -1))
            return pool, state, batch, _with_column(outputs, output, index)

        start = replace(jax.tree.map(jnp.asarray, batch), prev_row=jnp.full_like(follows, -1))
        carry = (pool, state, start, self._no_output(rows))
        pool, state, _, output = jax.lax.fori_loop(0, steps, step, carry)
        output = replace(output, num_accepted=jnp.full(rows, steps - 1, jnp.int32))
        return output, self._as_last(output), pool, state

    def verify(
        self,
        params: Params,
        pool: KVPool,
        state: SamplingState,
        batch: StepBatch,
        sampling: SamplingBatch,
    ) -> tuple[StepOutput, LastOutput, KVPool, SamplingState]:
        """Run decode rows of a token and its drafts; their new tokens (see `sampling.verify`)."""
        R, W = batch.sample_at.shape
        hidden, pool = self._run(params, batch, pool)
        hidden = hidden[jnp.asarray(batch.sample_at).reshape(R * W)]
        logits = self.model.unembed(self.config, params, hidden, self.ops)
        is_draft = jnp.arange(1, W) < jnp.asarray(batch.query_lens)[:, None]
        output, state = verify(
            jnp.where(is_draft, jnp.asarray(batch.tokens).reshape(R, W)[:, 1:], -1),
            None,
            logits.reshape(R, W, -1),
            sampling,
            state,
            vocab_size=self.vocab_size,
            row_sum=self.ops.row_sum,
        )
        return output, self._as_last(output), pool, state

    def _no_output(self, rows: int) -> StepOutput:
        logprobs = no_logprobs(rows * self.max_steps)
        return StepOutput(
            tokens=jnp.zeros((rows, self.max_steps), jnp.int32),
            num_accepted=jnp.zeros(rows, jnp.int32),
            ok=jnp.ones(rows, bool),
            logprobs=jax.tree.map(
                lambda leaf: leaf.reshape(rows, self.max_steps, *leaf.shape[1:]), logprobs
            ),
        )

    def score(self, params: Params, hidden: jax.Array, targets: jax.Array) -> Logprobs:
        """Logprobs, leading axis [prefill tokens], of targets [prefill tokens] int32, the tokens
        that follow; -1: not asked for."""
        return prompt_logprobs(
            hidden,
            targets,
            lambda piece: self.model.unembed(self.config, params, piece, self.ops),
            self.vocab_size,
            self.ops.row_sum,
        )

    # The arguments below are arrays or shapes. What is donated is written in place.

    def forward_program(
        self, params: Params, pool: KVPool, batch: StepBatch, last: LastOutput
    ) -> Program:
        """`forward` for this batch's bucket; the pool is donated."""
        here = replicated(self.mesh)
        places = (here, here if batch.prefill_tokens else None, self._places(pool))
        args = (params, pool, batch, last)
        return self._program("forward", self.forward, args, range(1, 2), places)

    def decode_program(
        self,
        params: Params,
        pool: KVPool,
        state: SamplingState,
        batch: StepBatch,
        last: LastOutput,
        sampling: SamplingBatch,
    ) -> Program:
        """`decode` for this number of rows; the pool and the sampling state are donated."""
        args = (params, pool, state, batch, last, sampling, np.int32(1))
        output, last_place, state_place = self._everywhere((_OUTPUT, _LAST, state))
        places = (output, last_place, self._places(pool), state_place)
        return self._program("decode", self.decode, args, range(1, 3), places)

    def sample_program(
        self,
        params: Params,
        hidden: jax.ShapeDtypeStruct,
        sampling: SamplingBatch,
        state: SamplingState,
    ) -> Program:
        """`sample` for this number of rows; the sampling state is donated."""
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=replicated(self.mesh))
        results = self._everywhere((_OUTPUT, _LAST, state))
        args = (params, hidden, sampling, state)
        return self._program("sample", self.sample, args, range(3, 4), results)

    def score_program(self, params: Params, hidden: jax.ShapeDtypeStruct) -> Program:
        """`score` for this number of prefill tokens; nothing is donated."""
        here = replicated(self.mesh)
        args = (
            params,
            jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=here),
            np.zeros(hidden.shape[0], np.int32),
        )
        return self._program("score", self.score, args, range(0), self._everywhere(_LOGPROBS))

    def verify_program(
        self,
        params: Params,
        pool: KVPool,
        state: SamplingState,
        batch: StepBatch,
        sampling: SamplingBatch,
    ) -> Program:
        """`verify` for this shape; the pool and the sampling state are donated."""
        output, last, state_place = self._everywhere((_OUTPUT, _LAST, state))
        places = (output, last, self._places(pool), state_place)
        args = (params, pool, state, batch, sampling)
        return self._program("verify", self.verify, args, range(1, 3), places)

    def scrub_program(self, pool: KVPool, num_pages: int) -> Program:
        """`scrub_pages` for that many pages; the pool is donated."""
        args = (pool, np.zeros(num_pages, np.int32))
        return self._program("scrub", scrub_pages, args, range(1), self._places(pool))

    def copy_program(self, pool: KVPool) -> Program:
        """`copy_pages`; the pool is donated."""
        ids = np.zeros(BATCH, np.int32)
        return self._program("copy", copy_pages, (pool, ids, ids), range(1), self._places(pool))

    def read_program(self, pool: KVPool) -> Program:
        """`read_pages`; nothing is donated."""
        ids = np.zeros(BATCH, np.int32)
        return self._program("read", read_pages, (pool, ids), range(0), self._places(pool))

    def write_program(self, pool: KVPool) -> Program:
        """`write_pages`; the pool is donated."""
        args = (pool, np.zeros(BATCH, np.int32), shapes_of_pages(pool, BATCH))
        return self._program("write", write_pages, args, range(1), self._places(pool))

    def set_slot_program(self, state: SamplingState) -> Program:
        """`set_slot`; the sampling state is donated."""
        vocab = self.vocab_size
        args = (state, np.int32(0), np.zeros(vocab, bool), np.zeros(vocab, np.int32))
        return self._program("set_slot", set_slot, args, range(1), self._everywhere(state))

    def _places(self, pool: KVPool) -> KVPool:
        return pool_shardings(self.mesh, pool)

    def _everywhere(self, tree: Any) -> Any:
        return jax.tree.map(lambda _: replicated(self.mesh), tree)

    def _program(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donated: range,
        places: Any,
    ) -> Program:
        model, config, ops = self.model, self.config, self.ops
        sizes = (
            self.vocab_size, self.page_size, self.max_rows, self.max_steps, self.max_draws
        )  # fmt: skip
        return Program(
            name,
            function,
            args,
            donated,
            result=places,
            shardings=places,
            identity=(model, config, ops, sizes, self.features),
            keep=self.mesh.size == 1,
        )


def _with_column(outputs: StepOutput, output: StepOutput, index: jax.Array) -> StepOutput:
    """`outputs` with a step's `output`, of one column, as column `index`."""

    def put(columns: jax.Array, column: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(columns, column, index, axis=1)

    return replace(
        outputs,
        tokens=put(outputs.tokens, output.tokens),
        ok=outputs.ok & output.ok,
        logprobs=jax.tree.map(put, outputs.logprobs, output.logprobs),
    )
