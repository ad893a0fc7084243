"""Whole steps of Llama-3-8B compiled for an H200, and what the compilers say about each."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.backends import make_ops
from jaxserve.core.buckets import Bucket
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool, pool_shapes
from jaxserve.core.mesh import replicated
from jaxserve.core.program_loader import Program, ProgramLoader
from jaxserve.core.program_memory import tree_bytes
from jaxserve.core.step_batch import StepBatch
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.plan import Plan
from jaxserve.engine.programs import LastOutput, Programs
from jaxserve.loading.describe import DescribedModel
from jaxserve.models.base import Params
from jaxserve.planning.compiled_kernels import CompiledKernel, report_of
from jaxserve.planning.h200 import h200_mesh
from jaxserve.sampling import make_state
from scripts.gpu_kernels.llama import KV_TYPES, Row, Work, described, step_work

PAGE_SIZE = 64
CONTEXT = 8192  # tokens of a row, the longest the model takes
_PAGES_PER_ROW = CONTEXT // PAGE_SIZE
_BF16 = np.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Step:
    """A step's shape and the rows it is judged by: all decode rows at the longest context."""

    bucket: Bucket
    rows: tuple[Row, ...]

    @property
    def sampled(self) -> int:
        return self.bucket.num_rows * self.bucket.width


def _step(decode_rows: int, width: int = 1, prefill_tokens: int = 0) -> Step:
    rows = [Row(width, CONTEXT)] * decode_rows
    if prefill_tokens:
        rows.append(Row(prefill_tokens, CONTEXT))
    return Step(Bucket(decode_rows, width, 8 if prefill_tokens else 0, prefill_tokens), tuple(rows))


STEPS = {"decode": _step(64), "mixed": _step(64, 1, 512), "verify": _step(16, 4)}


@dataclass(frozen=True)
class StepReport:
    """temporaries: bytes beside weights and pool. in_place: no part of the pool is copied.
    seconds: that compiling took."""

    name: str
    weights: str
    kv: str
    layers: int
    kernels: tuple[CompiledKernel, ...]
    temporaries: int
    in_place: bool
    work: Work
    seconds: float

    @property
    def spilling(self) -> tuple[CompiledKernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.spills)


def compile_step(name: str, weights: str, kv: str, layers: int) -> StepReport:
    """The engine's own programs for the step `name` of STEPS, sampling included.

    Raises RuntimeError, as XLA does, for what does not compile.
    """
    step, model = STEPS[name], described(weights, layers)
    pool = _pool(model, kv)
    mesh = h200_mesh()
    began = time.monotonic()
    compiled: list[jax.stages.Compiled] = []
    kernels: list[CompiledKernel] = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for program in _programs(model, step.bucket, pool, mesh):
            report = report_of(lambda program=program: ProgramLoader().compile(program).compiled)
            compiled.append(report.compiled)
            kernels += report.kernels
    memory = [one.memory_analysis() for one in compiled]
    temporaries = max(one.temp_size_in_bytes for one in memory)
    return StepReport(
        name=name,
        weights=weights,
        kv=kv,
        layers=layers,
        kernels=tuple(kernels),
        temporaries=temporaries,
        in_place=memory[0].alias_size_in_bytes >= tree_bytes(pool) > 10 * temporaries,
        work=step_work(model, kv, step.rows, step.sampled),
        seconds=time.monotonic() - began,
    )


def _programs(model: DescribedModel, bucket: Bucket, pool: KVPool, mesh: Mesh) -> Iterator[Program]:
    """Of shapes on the mesh: what the engine runs for a step of this bucket. The first one has the
    pool, which is given away."""
    rows = bucket.num_rows
    draws = max(MAX_BURST, bucket.width)
    programs = Programs(
        model.model,
        model.config,
        make_ops("mosaic_gpu", model.model.kv_spec(model.config)),
        vocab_size=model.vocab_size,
        page_size=PAGE_SIZE,
        max_rows=rows,
        max_steps=MAX_BURST,
        max_draws=draws,
        mesh=mesh,
    )
    made = (
        model.params,
        pool,
        build_batch(
            Plan(), bucket, num_groups=1, pages_per_row=_PAGES_PER_ROW, page_size=PAGE_SIZE
        ),
        build_sampling(Plan(), bucket),
        jax.eval_shape(lambda: make_state(rows + 1, model.vocab_size)),
        LastOutput(
            jax.ShapeDtypeStruct((rows, draws), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
    )
    place = replicated(mesh)
    params, pool, batch, sampling, state, last = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), made
    )
    if bucket.width > 1:
        yield programs.verify_program(params, pool, state, batch, sampling)
    elif not bucket.prefill_tokens:
        yield programs.decode_program(params, pool, state, batch, last, sampling)
    else:
        forward = programs.forward_program(params, pool, batch, last)
        yield forward
        hidden, *_ = jax.eval_shape(forward.function, *forward.args)
        yield programs.sample_program(params, hidden, sampling, state)


def decode_step(model: DescribedModel, rows: int, context: int) -> tuple[Any, tuple[Any, ...]]:
    """A step to run: its function, and (shapes of the parameters, a pool, a batch of that many
    rows, each with so many tokens)."""
    layout, pages = kv_layout(model.model.kv_spec(model.config)), -(-context // PAGE_SIZE)
    pool = make_pool(layout, rows * pages + 1, PAGE_SIZE, _BF16, backend="mosaic_gpu")
    batch = build_batch(
        Plan(), Bucket(rows, 1, 0, 0), num_groups=1, pages_per_row=pages, page_size=PAGE_SIZE
    )
    table = np.arange(1, rows * pages + 1, dtype=np.int32).reshape(1, rows, pages)
    at = np.arange(rows, dtype=np.int32)
    last = table[:, :, -1] * PAGE_SIZE + (context - 1) % PAGE_SIZE
    batch = replace(
        batch,
        positions=np.full(rows, context - 1, np.int32),
        row_of_token=at,
        query_lens=np.ones(rows, np.int32),
        kv_lens=np.full(rows, context, np.int32),
        page_table=table,
        write_slot=last,
        sample_at=at[:, None],
    )
    return _run(model), (model.params, pool, batch)


def _pool(model: DescribedModel, kv: str) -> KVPool:
    """Room for 64 rows of the longest context."""
    layout = kv_layout(model.model.kv_spec(model.config))
    dtype = np.dtype(jnp.dtype(KV_TYPES[kv]))
    return pool_shapes(layout, 64 * _PAGES_PER_ROW + 1, PAGE_SIZE, dtype, "mosaic_gpu")


def _run(model: DescribedModel) -> Any:
    ops = make_ops("mosaic_gpu", model.model.kv_spec(model.config))

    def run(params: Params, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        hidden, _taps, pool = model.model.forward(model.config, params, batch, pool, ops)
        sampled = hidden[jnp.asarray(batch.sample_at).reshape(-1)]
        logits = model.model.unembed(model.config, params, sampled, ops)
        return jnp.argmax(logits, axis=-1), pool

    return run
