"""The engine's own step programs, made from shapes: their memory and operations, nothing run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.buckets import Bucket
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import pool_shapes
from jaxserve.core.mesh import replicated
from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import Program, ProgramLoader
from jaxserve.core.program_memory import program_memory, step_temporaries
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.plan import Plan
from jaxserve.engine.programs import LastOutput, Programs
from jaxserve.loading.describe import DescribedModel
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling import make_state


class StepPrograms:
    """The programs of every bucket, for the devices of a mesh."""

    def __init__(
        self,
        model: LoadedModel | DescribedModel,
        shape: EngineShape,
        ops: Ops,
        mesh: Mesh,
        loader: ProgramLoader,
    ) -> None:
        layout = kv_layout(model.model.kv_spec(model.config))
        self._shape = shape
        self._mesh = mesh
        self._loader = loader
        self._programs = Programs(
            model.model,
            model.config,
            ops,
            vocab_size=model.vocab_size,
            page_size=shape.page_size,
            max_rows=shape.max_rows,
            max_steps=MAX_BURST,
            max_draws=shape.max_draws,
            mesh=mesh,
            features=shape.features,
        )
        pool = pool_shapes(
            layout, shape.num_pages, shape.page_size, shape.kv_dtype, ops.name, shape.features
        )
        self._params = self._everywhere(model.params)
        self._pool = self._everywhere(pool)
        slots, vocab = shape.limits.max_batch_rows + 1, model.vocab_size
        self._state = self._everywhere(jax.eval_shape(lambda: make_state(slots, vocab)))
        rows = shape.max_rows
        self._last = self._everywhere(
            LastOutput(
                jax.ShapeDtypeStruct((rows, shape.max_draws), jnp.int32),
                jax.ShapeDtypeStruct((rows,), jnp.int32),
            )
        )

    def temporaries(self, bucket: Bucket) -> int:
        """Bytes a step takes beside parameters, pool and state, by XLA, where it also computes
        logprobs of prompt tokens. Compiles: takes seconds."""
        programs = self._programs_of(bucket)
        memory = [program_memory(self._compiled(program)) for program in programs]
        known = [one for one in memory if one is not None]
        assert len(known) == len(memory), "this backend has no memory analysis"
        return step_temporaries(known)

    def operations(self, bucket: Bucket) -> int | None:
        """As XLA counts them in the programs it is given, each pass of attention's loops once;
        without logprobs of prompt tokens.

        None where native kernels hide them. Nothing is compiled: compiled programs for a GPU call
        libraries, in which they cannot be counted.
        """
        if self._programs.ops.name != "reference":
            return None
        total = 0.0
        for program in self._programs_of(bucket)[:2]:
            leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in program.leaves]
            found = jax.jit(program.on_leaves).lower(*leaves).cost_analysis()
            total += (found or {}).get("flops", 0.0)
        return int(total)

    def _programs_of(self, bucket: Bucket) -> list[Program]:
        """Forward, sample, and score in buckets with prompts."""
        forward = self._forward(bucket)
        hidden, prompt, _ = jax.eval_shape(forward.function, *forward.args)
        programs = [forward, self._sample(bucket, hidden)]
        if prompt is not None:
            programs.append(self._programs.score_program(self._params, prompt))
        return programs

    def _forward(self, bucket: Bucket) -> Program:
        shape = self._shape
        batch = build_batch(
            Plan(),
            bucket,
            num_groups=shape.num_groups,
            pages_per_row=shape.pages_per_row,
            page_size=shape.page_size,
        )
        batch = self._everywhere(batch)
        return self._programs.forward_program(self._params, self._pool, batch, self._last)

    def _sample(self, bucket: Bucket, hidden: Any) -> Program:
        sampling = self._everywhere(build_sampling(Plan(), bucket))
        return self._programs.sample_program(self._params, hidden, sampling, self._state)

    def _compiled(self, program: Program) -> jax.stages.Compiled:
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            return self._loader.compile(program).compiled

    def _everywhere(self, tree: Any) -> Any:
        place = replicated(self._mesh)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
        )
