"""The programs of an engine: two or three per bucket and a few for rare events, ahead of time.

forward: tokens -> hidden states at the sampled positions, and of all prefill tokens; pool donated.
sample: hidden -> logits -> tokens, sampling state donated.
score: hidden states of prefill tokens -> logprobs of the prompt tokens that follow, where wanted.
Separate calls, so that a token mask can be made while forward runs, and so that sampling and
scoring never multiply the forward shapes, nor change a bit of what forward computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

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
from jaxserve.sampling.logprobs import prompt_logprobs


@dataclass(frozen=True)
class LastOutput:
    """The previous step's result, on the device: tokens [max rows, W] and num_accepted [max rows].

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
    """The step functions before compilation. All fields are static: equal programs share traces."""

    model: ModelDef
    config: Config
    ops: Ops
    vocab_size: int
    page_size: int
    max_rows: int
    mesh: Mesh

    def forward(
        self, params: Params, pool: KVPool, batch: StepBatch, last: LastOutput
    ) -> tuple[jax.Array, jax.Array | None, KVPool]:
        """hidden [R, W, E] at batch.sample_at, hidden [prefill tokens, E] (None in a decode step),
        and the pool with this step's keys and values."""
        batch = resolve_previous(batch, last.tokens, last.num_accepted, self.page_size)
        hidden, _taps, pool = self.model.forward(self.config, params, batch, pool, self.ops)
        count = batch.prefill_tokens
        return hidden[batch.sample_at], hidden[-count:] if count else None, pool

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
        pad = self.max_rows - R
        last = LastOutput(
            jnp.pad(output.tokens, ((0, pad), (0, 0))), jnp.pad(output.num_accepted, (0, pad))
        )
        return output, last, state

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
        return self._program("forward", self.forward, (params, pool, batch, last), 1, places)

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
        return self._program("sample", self.sample, (params, hidden, sampling, state), 3, results)

    def score_program(self, params: Params, hidden: jax.ShapeDtypeStruct) -> Program:
        """`score` for this number of prefill tokens; nothing is donated."""
        here = replicated(self.mesh)
        args = (
            params,
            jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=here),
            np.zeros(hidden.shape[0], np.int32),
        )
        return self._program("score", self.score, args, None, self._everywhere(_LOGPROBS))

    def scrub_program(self, pool: KVPool, num_pages: int) -> Program:
        """`scrub_pages` for that many pages; the pool is donated."""
        args = (pool, np.zeros(num_pages, np.int32))
        return self._program("scrub", scrub_pages, args, 0, self._places(pool))

    def copy_program(self, pool: KVPool) -> Program:
        """`copy_pages`; the pool is donated."""
        ids = np.zeros(BATCH, np.int32)
        return self._program("copy", copy_pages, (pool, ids, ids), 0, self._places(pool))

    def read_program(self, pool: KVPool) -> Program:
        """`read_pages`; nothing is donated."""
        ids = np.zeros(BATCH, np.int32)
        return self._program("read", read_pages, (pool, ids), None, self._places(pool))

    def write_program(self, pool: KVPool) -> Program:
        """`write_pages`; the pool is donated."""
        args = (pool, np.zeros(BATCH, np.int32), shapes_of_pages(pool, BATCH))
        return self._program("write", write_pages, args, 0, self._places(pool))

    def set_slot_program(self, state: SamplingState) -> Program:
        """`set_slot`; the sampling state is donated."""
        vocab = self.vocab_size
        args = (state, np.int32(0), np.zeros(vocab, bool), np.zeros(vocab, np.int32))
        return self._program("set_slot", set_slot, args, 0, self._everywhere(state))

    def _places(self, pool: KVPool) -> KVPool:
        return pool_shardings(self.mesh, pool)

    def _everywhere(self, tree: Any) -> Any:
        return jax.tree.map(lambda _: replicated(self.mesh), tree)

    def _program(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donated: int | None,
        places: Any,
    ) -> Program:
        model, config, ops = self.model, self.config, self.ops
        sizes = (self.vocab_size, self.page_size, self.max_rows)
        return Program(
            name,
            function,
            args,
            donated,
            result=places,
            shardings=places,
            identity=(model, config, ops, sizes),
            keep=self.mesh.size == 1,
        )
