"""Owns everything on the device: params, KV pool, sampling state and the compiled steps.

The only place that calls XLA while serving. A step is dispatched asynchronously; `result` waits.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.buckets import Bucket
from jaxserve.core.compile_cache import compilations
from jaxserve.core.kv_pool import KVPool, make_pool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.mesh import place_params, pool_shardings, replicated
from jaxserve.core.step_batch import SamplingBatch, SamplingState, StepBatch, StepOutput
from jaxserve.engine.programs import LastOutput, Programs, scrub_pages
from jaxserve.models.base import Params
from jaxserve.sampling import make_state, set_slot

_COMPILE_THREADS = 2

MakeInputs = Callable[[Bucket], tuple[StepBatch, SamplingBatch]]


@dataclass(frozen=True)
class StepHandle:
    """A dispatched step. `batch` and `sampling` are kept because XLA reads them without a copy."""

    output: StepOutput
    batch: StepBatch
    sampling: SamplingBatch
    wants_logprobs: bool

    def result(self) -> StepOutput:
        """Wait, and fetch what the host needs as numpy: logprobs only if a row asked for them."""
        output = self.output
        fetched = output if self.wants_logprobs else (output.tokens, output.num_accepted, output.ok)
        host = jax.device_get(fetched)
        if self.wants_logprobs:
            assert isinstance(host, StepOutput)
            return host
        tokens, num_accepted, ok = host
        return StepOutput(tokens, num_accepted, ok, output.logprobs)


class Runner:
    """Params, pool and programs of one engine; used by the engine's thread alone."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        kv_spec: KVSpec,
        *,
        num_pages: int,
        dtype: np.dtype,
        width: int,
        state_slots: int,
        pages_per_row: int,
    ) -> None:
        self._programs = programs
        self._mesh = programs.mesh
        specs = programs.model.param_specs(programs.config)
        self._params = place_params(self._mesh, params, specs)
        self._kv_spec = kv_spec
        self._num_pages = num_pages
        self._dtype = dtype
        self._width = width
        self._state_slots = state_slots
        self._pages_per_row = pages_per_row
        self._forward: dict[Bucket, jax.stages.Compiled] = {}
        self._sample: dict[int, jax.stages.Compiled] = {}
        self._compiled_late = 0
        self.reset()
        self._set_slot = jax.jit(set_slot, donate_argnums=0, out_shardings=replicated(self._mesh))
        self._scrub_pages = jax.jit(
            scrub_pages, donate_argnums=0, out_shardings=pool_shardings(self._mesh, self._pool)
        )

    def reset(self) -> None:
        """A fresh pool and sampling state: at start, and after a step failed with both donated."""
        everywhere = replicated(self._mesh)
        self._pool: KVPool = make_pool(
            self._kv_spec,
            self._num_pages,
            self._programs.page_size,
            self._dtype,
            partial(pool_shardings, self._mesh),
        )
        state = make_state(self._state_slots, self._programs.vocab_size)
        self._state: SamplingState = jax.device_put(state, everywhere)
        rows = self._programs.max_rows
        self._last = LastOutput(
            jnp.zeros((rows, self._width), jnp.int32, device=everywhere),
            jnp.zeros(rows, jnp.int32, device=everywhere),
        )

    @property
    def pool(self) -> KVPool:
        """The pool as it is after the last dispatched step."""
        return self._pool

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that are compiled."""
        return tuple(self._forward)

    @property
    def late_compiles(self) -> int:
        """Programs compiled by a dispatch; 0 in a healthy engine."""
        return self._compiled_late

    def compile(
        self,
        buckets: Iterable[Bucket],
        make_inputs: MakeInputs,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Compile (or load from the disk cache) all buckets, two at a time, and the helpers.

        `make_inputs` is the function that builds live batches, given nothing to do: warm-up and
        service cannot disagree about a shape or a dtype.
        """
        with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
            jobs: list[tuple[Bucket | int, Future[tuple[jax.stages.Compiled, float]]]] = []
            for bucket in buckets:
                batch, sampling = make_inputs(bucket)
                forward = self._programs.lower_forward(self._params, self._pool, batch, self._last)
                jobs.append((bucket, pool.submit(_timed_compile, forward)))
                rows = bucket.num_rows
                if rows not in self._sample and rows not in [key for key, _ in jobs]:
                    hidden = forward.out_info[0]
                    shape = jax.ShapeDtypeStruct(
                        hidden.shape, hidden.dtype, sharding=replicated(self._mesh)
                    )
                    lowered = self._programs.lower_sample(
                        self._params, shape, sampling, self._state
                    )
                    jobs.append((rows, pool.submit(_timed_compile, lowered)))
            for key, job in jobs:
                compiled, seconds = job.result()
                if isinstance(key, Bucket):
                    self._forward[key] = compiled
                else:
                    self._sample[key] = compiled
                if progress is not None:
                    name = key.name if isinstance(key, Bucket) else f"sample{key}"
                    progress(f"compiled {name} in {seconds:.1f} s")
        self._run_helpers()

    def _run_helpers(self) -> None:
        """Compile the small programs that only rare events need."""
        self.scrub([])
        vocab = self._programs.vocab_size
        self.set_counts(0, np.zeros(vocab, bool), np.zeros(vocab, np.int32))

    def dispatch(self, bucket: Bucket, batch: StepBatch, sampling: SamplingBatch) -> StepHandle:
        """Start a step. Pool and state are donated to it and replaced by its results."""
        before = compilations.count
        hidden, self._pool = self._forward[bucket](self._params, self._pool, batch, self._last)
        output, self._last, self._state = self._sample[bucket.num_rows](
            self._params, hidden, sampling, self._state
        )
        self._compiled_late += compilations.count - before
        wants_logprobs = bool((np.asarray(sampling.num_logprobs) >= 0).any())
        return StepHandle(output, batch, sampling, wants_logprobs)

    def set_counts(self, slot: int, in_prompt: np.ndarray, output_counts: np.ndarray) -> None:
        """Fill a penalty slot: in_prompt [V] bool, output_counts [V] int32."""
        self._state = self._set_slot(self._state, np.int32(slot), in_prompt, output_counts)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN before they are handed out again."""
        for start in range(0, max(len(pages), 1), self._pages_per_row):
            ids = np.zeros(self._pages_per_row, np.int32)
            part = pages[start : start + self._pages_per_row]
            ids[: len(part)] = part
            self._pool = self._scrub_pages(self._pool, ids)

    def forward_aliases_pool(self, bucket: Bucket) -> bool:
        """Whether XLA really updates the pool in place in this bucket's program."""
        analysis = self._forward[bucket].memory_analysis()
        pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._pool))
        return analysis is not None and analysis.alias_size_in_bytes >= pool_bytes


def _timed_compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    start = time.monotonic()
    return lowered.compile(), time.monotonic() - start
