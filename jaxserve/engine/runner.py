"""Owns everything on the device: params, KV pool, sampling state and the compiled steps.

The only place that calls XLA while serving. A step is dispatched asynchronously; `result` waits.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.buckets import Bucket
from jaxserve.core.compile_cache import compilations
from jaxserve.core.gpu_memory import device_memory, usable_memory
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.mesh import place_params, pool_shardings, replicated
from jaxserve.core.program_loader import CompiledProgram, Leaves, Lowered, Program, ProgramLoader
from jaxserve.core.program_memory import program_memory, step_temporaries, tree_bytes
from jaxserve.core.step_batch import (
    Logprobs,
    SamplingBatch,
    SamplingState,
    StepBatch,
    StepOutput,
)
from jaxserve.engine.memory_plan import MemoryPlan
from jaxserve.engine.page_programs import BATCH, PageContents, PagesHandle, batches, padded
from jaxserve.engine.programs import LastOutput, Programs
from jaxserve.models.base import Params
from jaxserve.sampling import make_state

_COMPILE_THREADS = 2
_HELPERS = ("set_slot", "copy", "scrub", "read", "write")

MakeInputs = Callable[[Bucket], tuple[StepBatch, SamplingBatch]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class StepHandle:
    """A dispatched step. Its inputs are kept because XLA reads them without a copy.

    scores, targets: None unless logprobs of prompt tokens were asked for.
    """

    output: StepOutput
    batch: StepBatch
    sampling: SamplingBatch
    wants_logprobs: bool
    ended: threading.Event  # of the runner: some step has
    scores: Logprobs | None = None
    targets: np.ndarray | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended, well or badly."""
        tokens = self.output.tokens
        assert isinstance(tokens, jax.Array)
        return tokens.is_ready()

    def result(self) -> StepOutput:
        """Wait, and fetch what the host needs as numpy: logprobs only if a row asked for them."""
        output = self.output
        fetched = output if self.wants_logprobs else (output.tokens, output.num_accepted, output.ok)
        host = jax.device_get(fetched)
        self.ended.set()
        if self.wants_logprobs:
            assert isinstance(host, StepOutput)
            return host
        tokens, num_accepted, ok = host
        return StepOutput(tokens, num_accepted, ok, output.logprobs)

    def prompt_logprobs(self) -> Logprobs | None:
        """Wait for the logprobs of the targets, [prefill tokens] of them, as numpy."""
        return None if self.scores is None else jax.device_get(self.scores)


class Runner:
    """Params, pool and programs of one engine; used by the engine's thread alone.

    Programs may arrive on other threads meanwhile: a bucket is in `buckets` once both of its are
    there.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        kv_spec: KVSpec,
        loader: ProgramLoader,
        *,
        num_pages: int,
        dtype: np.dtype,
        state_slots: int,
        pages_per_row: int,
    ) -> None:
        self._programs = programs
        self._loader = loader
        self._mesh = programs.mesh
        specs = programs.model.param_specs(programs.config)
        self._params = place_params(self._mesh, params, specs)
        self._param_leaves = Leaves(jax.tree.leaves(self._params))
        self._layout = kv_layout(kv_spec)
        self._num_pages = num_pages
        self._dtype = dtype
        self._state_slots = state_slots
        self._pages_per_row = pages_per_row
        # The decode or forward program of a bucket, the sample program of a number of rows.
        self._compiled: dict[Bucket | int, CompiledProgram] = {}
        self._helpers: dict[str, Future[CompiledProgram]] = {name: Future() for name in _HELPERS}
        # The score program of a number of prefill tokens; there before a bucket of that many is.
        self._score: dict[int, Future[CompiledProgram]] = {}
        self._prefill_hidden: dict[int, jax.ShapeDtypeStruct] = {}  # what they read
        self._arriving = threading.Lock()
        self._buckets: tuple[Bucket, ...] = ()
        self._compiled_late = 0
        self.first_step = threading.Event()  # set once a step has ended
        self.reset()
        # Arrays are donated while programs are still being loaded; their shapes stay.
        self._shapes: tuple[Any, Any, Any, Any] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            (self._params, self._pool, self._last, self._state),
        )

    def reset(self) -> None:
        """A fresh pool and sampling state: at start, and after a step failed with both donated."""
        everywhere = replicated(self._mesh)
        self._pool: KVPool = make_pool(
            self._layout,
            self._num_pages,
            self._programs.page_size,
            self._dtype,
            partial(pool_shardings, self._mesh),
            self._programs.ops.name,
            self._programs.features,
        )
        state = make_state(self._state_slots, self._programs.vocab_size)
        self._state: SamplingState = jax.device_put(state, everywhere)
        rows = self._programs.max_rows
        self._last = LastOutput(
            jnp.zeros((rows, self._programs.max_draws), jnp.int32, device=everywhere),
            jnp.zeros(rows, jnp.int32, device=everywhere),
        )

    @property
    def params(self) -> Params:
        """The weights, where they are used."""
        return self._params

    @property
    def pool(self) -> KVPool:
        """The pool as it is after the last dispatched step."""
        return self._pool

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that can run now; another tuple whenever one has come."""
        return self._buckets

    @property
    def late_compiles(self) -> int:
        """Programs compiled by a dispatch; 0 in a healthy engine."""
        return self._compiled_late

    def load(
        self,
        buckets: Iterable[Bucket],
        make_inputs: MakeInputs,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
        *,
        scoring: bool = False,
    ) -> list[Program]:
        """Compile, or load from disk, the programs of these buckets, two at a time; returns them.

        `make_inputs` is the function that builds live batches, given nothing to do: warm-up and
        service cannot disagree about a shape or a dtype. `stop` ends it early, between programs.
        scoring: also what only requests for prompt logprobs need; else `load_helpers` brings it.
        """
        programs: list[Program] = []
        jobs: list[Future[None]] = []
        with ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="compile") as pool:

            def begin(key: Bucket | int, program: Program) -> Lowered:
                lowered = self._loader.lower(program)
                programs.append(program)
                if stop is None or not stop.is_set():
                    jobs.append(pool.submit(self._finish, key, program, lowered, progress))
                return lowered

            begun = {key for key in self._compiled if isinstance(key, int)}
            for bucket in buckets:
                if stop is not None and stop.is_set():
                    pool.shutdown(cancel_futures=True)
                    return programs
                batch, sampling = make_inputs(bucket)
                params, pages, last, state = self._shapes
                size, rows = bucket.prefill_tokens, bucket.num_rows
                if not size:
                    begin(bucket, self._decode_program(bucket, batch, sampling))
                    continue
                forward = self._programs.forward_program(params, pages, batch, last)
                self._score[size] = Future()
                hidden, prompt, *_ = begin(bucket, forward).results
                self._prefill_hidden[size] = prompt
                if scoring:
                    jobs.append(pool.submit(self._load_score, size))
                if rows not in begun:
                    begun.add(rows)
                    begin(rows, self._programs.sample_program(params, hidden, sampling, state))
            for job in jobs:
                job.result()
        return programs

    def _decode_program(self, bucket: Bucket, batch: StepBatch, sampling: SamplingBatch) -> Program:
        params, pages, last, state = self._shapes
        if bucket.width > 1:
            return self._programs.verify_program(params, pages, state, batch, sampling)
        return self._programs.decode_program(params, pages, state, batch, last, sampling)

    def _finish(
        self, key: Bucket | int, program: Program, lowered: Lowered, progress: Progress | None
    ) -> None:
        began = time.monotonic()
        compiled = self._loader.finish(program, lowered)
        with self._arriving:
            self._compiled[key] = compiled
            self._buckets = tuple(
                bucket
                for bucket in self._compiled
                if isinstance(bucket, Bucket)
                and (not bucket.prefill_tokens or bucket.num_rows in self._compiled)
            )
        if progress is not None:
            name = key.name if isinstance(key, Bucket) else f"sample{key}"
            progress(f"{name} is ready, in {time.monotonic() - began:.1f} s")

    def load_helpers(self) -> None:
        """Compile the programs that only rare events need, of what is loaded; those wait for
        them."""
        _, pool, _, state = self._shapes
        programs = self._programs
        make: dict[str, Callable[[], Program]] = {
            "set_slot": lambda: programs.set_slot_program(state),
            "copy": lambda: programs.copy_program(pool),
            "scrub": lambda: programs.scrub_program(pool, self._pages_per_row),
            "read": lambda: programs.read_program(pool),
            "write": lambda: programs.write_program(pool),
        }
        for name, future in self._helpers.items():
            try:
                future.set_result(self._loader.compile(make[name]()))
            except Exception as error:  # whatever XLA raises: for who needs the program
                future.set_exception(error)
        for size, future in self._score.items():
            if not future.done():
                self._load_score(size)

    def _load_score(self, size: int) -> None:
        try:
            program = self._programs.score_program(self._shapes[0], self._prefill_hidden[size])
            self._score[size].set_result(self._loader.compile(program))
        except Exception as error:  # as of the helpers
            self._score[size].set_exception(error)

    def dispatch(
        self,
        bucket: Bucket,
        batch: StepBatch,
        sampling: SamplingBatch,
        targets: np.ndarray | None = None,
        steps: int = 1,
    ) -> StepHandle:
        """Start a step. Pool and state are donated to it and replaced by its results.

        steps: how often a decode batch is run (see `Programs.decode`). targets int32 [prefill
        tokens]: the prompt tokens whose logprobs are wanted (see `Programs.score`); None: nobody
        wants any.
        """
        before = compilations.count
        scores = None
        if bucket.prefill_tokens:
            output, scores = self._run_mixed(bucket, batch, sampling, targets)
        else:
            step = partial(self._compiled[bucket], self._param_leaves, self._pool, self._state)
            if bucket.width > 1:
                output, self._last, self._pool, self._state = step(batch, sampling)
            else:
                output, self._last, self._pool, self._state = step(
                    batch, self._last, sampling, np.int32(steps)
                )
        self._compiled_late += compilations.count - before
        wants_logprobs = bool((np.asarray(sampling.num_logprobs) >= 0).any())
        ended = self.first_step
        return StepHandle(output, batch, sampling, wants_logprobs, ended, scores, targets)

    def _run_mixed(
        self,
        bucket: Bucket,
        batch: StepBatch,
        sampling: SamplingBatch,
        targets: np.ndarray | None,
    ) -> tuple[StepOutput, Logprobs | None]:
        score = None if targets is None else self._score[bucket.prefill_tokens].result()
        forward, sample = self._compiled[bucket], self._compiled[bucket.num_rows]
        hidden, prompt, self._pool = forward(self._param_leaves, self._pool, batch, self._last)
        output, self._last, self._state = sample(self._param_leaves, hidden, sampling, self._state)
        return output, None if score is None else score(self._param_leaves, prompt, targets)

    def set_counts(self, slot: int, in_prompt: np.ndarray, output_counts: np.ndarray) -> None:
        """Fill a penalty slot: in_prompt [V] bool, output_counts [V] int32."""
        program = self._helpers["set_slot"].result()
        self._state = program(self._state, np.int32(slot), in_prompt, output_counts)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN before they are handed out again."""
        program = self._helpers["scrub"].result()
        for start in range(0, len(pages), self._pages_per_row):
            ids = np.zeros(self._pages_per_row, np.int32)
            part = pages[start : start + self._pages_per_row]
            ids[: len(part)] = part
            self._pool = program(self._pool, ids)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, [(from, to)], in every array: all are read before any is written."""
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if len(pairs) > BATCH and not set(sources).isdisjoint(targets):
            self._copy_in_two_passes(sources, targets)
            return
        program = self._helpers["copy"].result()
        read, written = batches(sources, padding=0), batches(targets, padding=self._num_pages)
        for (_, _, source_ids), (_, _, target_ids) in zip(read, written, strict=True):
            self._pool = program(self._pool, source_ids, target_ids)

    def _copy_in_two_passes(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What one batch writes another one reads: so everything is read first."""
        contents = self.read_pages(sources).parts
        program = self._helpers["write"].result()
        written = batches(targets, padding=self._num_pages)
        for (_, part), (_, _, ids) in zip(contents, written, strict=True):
            self._pool = program(self._pool, ids, part)

    def read_pages(self, pages: Sequence[int]) -> PagesHandle:
        """Fetch pages as they are after the last dispatch; does not wait."""
        program = self._helpers["read"].result()
        return PagesHandle(
            tuple(
                (number, program(self._pool, ids)) for _, number, ids in batches(pages, padding=0)
            )
        )

    def write_pages(self, pages: Sequence[int], contents: PageContents) -> None:
        """Fill pages with what `read_pages` gave. `contents` may be read until the next step ends,
        so its arrays are not to be changed."""
        program = self._helpers["write"].result()
        for first, number, ids in batches(pages, padding=self._num_pages):
            self._pool = program(self._pool, ids, padded(contents, first, number))

    def memory_plan(self, bucket: Bucket, host_tier: int = 0) -> MemoryPlan:
        """What is held, and what a step of this bucket, which is loaded, adds. Any thread may ask.

        host_tier: bytes of host memory for pages that left the pool.
        """
        params, pool, _, state = self._shapes
        programs = [self._compiled[bucket]]
        if bucket.prefill_tokens:
            programs.append(self._compiled[bucket.num_rows])
        score = self._score.get(bucket.prefill_tokens)
        if score is not None and score.done() and score.exception() is None:
            programs.append(score.result())
        memory = [program_memory(program.compiled) for program in programs]
        device = self._mesh.devices.flat[0]
        return MemoryPlan(
            weights=tree_bytes(params),
            pool=tree_bytes(pool),
            temporaries=step_temporaries(one for one in memory if one is not None),
            sampling_state=tree_bytes(state),
            host_tier=host_tier,
            bucket=bucket.name,
            device=device.device_kind,
            device_memory=device_memory(device),
            usable=usable_memory(device),
        )

    def forward_aliases_pool(self, bucket: Bucket) -> bool:
        """Whether XLA really updates the pool in place in this bucket's program."""
        analysis = self._compiled[bucket].compiled.memory_analysis()
        pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._pool))
        return analysis is not None and analysis.alias_size_in_bytes >= pool_bytes
