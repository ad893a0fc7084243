"""The compiled programs of an engine: two per bucket, ahead of time, nothing on demand.

forward: tokens -> hidden states at the sampled positions, pool donated.
sample: hidden -> logits -> tokens, sampling state donated.
Two calls, so that a token mask can be made while forward runs, and so that sampling never
multiplies the forward shapes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.mesh import pool_shardings, replicated
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import (
    SamplingBatch,
    SamplingState,
    StepBatch,
    StepOutput,
    resolve_previous,
)
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.sampling import sample


@dataclass(frozen=True)
class LastOutput:
    """The previous step's result, on the device: tokens [max rows, W] and num_accepted [max rows].

    Padded to the largest bucket, so that its shape does not multiply the programs.
    """

    tokens: jax.Array
    num_accepted: jax.Array


jax.tree_util.register_dataclass(LastOutput, ["tokens", "num_accepted"], [])


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
    ) -> tuple[jax.Array, KVPool]:
        """hidden [R, W, E] at batch.sample_at, and the pool with this step's keys and values."""
        batch = resolve_previous(batch, last.tokens, last.num_accepted, self.page_size)
        hidden, _taps, pool = self.model.forward(self.config, params, batch, pool, self.ops)
        return hidden[batch.sample_at], pool

    def sample(
        self, params: Params, hidden: jax.Array, sampling: SamplingBatch, state: SamplingState
    ) -> tuple[StepOutput, LastOutput, SamplingState]:
        """Draw each row's token; also return it padded, as the next step's `last`."""
        R, W, E = hidden.shape
        logits = self.model.unembed(self.config, params, hidden.reshape(R * W, E), self.ops)
        output, state = sample(
            logits.reshape(R, W, -1), sampling, state, vocab_size=self.vocab_size
        )
        pad = self.max_rows - R
        last = LastOutput(
            jnp.pad(output.tokens, ((0, pad), (0, 0))), jnp.pad(output.num_accepted, (0, pad))
        )
        return output, last, state

    def lower_forward(
        self, params: Params, pool: KVPool, batch: StepBatch, last: LastOutput
    ) -> jax.stages.Lowered:
        """Trace for this batch's bucket; the pool is donated, so the step writes it in place."""
        places = (replicated(self.mesh), pool_shardings(self.mesh, pool))
        step = jax.jit(self.forward, donate_argnums=1, out_shardings=places)
        return step.lower(params, pool, batch, last)

    def lower_sample(
        self,
        params: Params,
        hidden: jax.ShapeDtypeStruct,
        sampling: SamplingBatch,
        state: SamplingState,
    ) -> jax.stages.Lowered:
        """Trace for this number of rows; the sampling state is donated."""
        step = jax.jit(self.sample, donate_argnums=3, out_shardings=replicated(self.mesh))
        return step.lower(params, hidden, sampling, state)


def scrub_pages(pool: KVPool, pages: jax.Array) -> KVPool:
    """Zero the given pages [n] in every layer: NaN must not outlive the row that made it."""
    return jax.tree.map(lambda leaf: leaf.at[pages].set(0), pool)
