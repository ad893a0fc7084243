"""Drafts of EAGLE, EAGLE-3 and MTP heads: one small layer over the target's features.

The features are in the target's pool (core/features.py), written by the target's own steps. The
keys and values of known tokens are those of the target's features; drafted tokens are run with the
draft's own, and run again once they are known.

A pair is kept in the page of its first token. So at the end of a page that requests share while
they go on differently, each may find what another wrote there: that can cost a draft now and then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.core.buckets import Bucket, pick_bucket
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool
from jaxserve.core.mesh import place_params, pool_shardings
from jaxserve.core.program_loader import CompiledProgram, Leaves, ProgramLoader
from jaxserve.core.step_batch import SamplingBatch, StepBatch
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.proposers.device_proposer import View
from jaxserve.engine.proposers.feature_programs import FeaturePrograms
from jaxserve.models.base import Params

Features = Callable[[], jax.Array]  # the array of the target's pool, as its last step left it


class FeatureHeads:
    """A `Drafter`. A token is run as a pair with the feature before it, so the first one never."""

    first_token = 1

    def __init__(
        self,
        programs: FeaturePrograms,
        params: Params,
        own: Params,
        features: Features,
        shape: EngineShape,
        loader: ProgramLoader,
    ) -> None:
        """params: the target's, where they are used; own: the draft's. shape: the target's."""
        self.name = programs.draft.name
        self.most_drafts = programs.num_drafts
        self.most_pending = programs.num_drafts + 1  # what a step with all drafts right leaves
        self._programs = programs
        self._shape = shape
        self._loader = loader
        self._features = features
        mesh = programs.mesh
        specs = programs.draft.param_specs(programs.config)
        self._params = params, place_params(mesh, own, specs)
        self._leaves = tuple(Leaves(jax.tree.leaves(tree)) for tree in self._params)
        self._layout = kv_layout(programs.draft.kv_spec(programs.config))
        self._compiled: dict[Bucket, CompiledProgram] = {}
        self.reset()
        self._shapes: tuple[Any, ...] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            (*self._params, self._pool, features()),
        )

    def reset(self) -> None:
        """See Drafter."""
        mesh, shape = self._programs.mesh, self._shape
        self._pool: KVPool = make_pool(
            self._layout,
            shape.num_pages,
            shape.page_size,
            shape.kv_dtype,
            lambda pool: pool_shardings(mesh, pool),
            self._programs.ops.name,
        )

    @property
    def is_loaded(self) -> bool:
        return bool(self._compiled)

    @property
    def prompt_shape(self) -> tuple[int, int] | None:
        """See Drafter."""
        largest = self._prompt_buckets()[-1]
        return largest.prefill_rows, largest.prefill_tokens

    def load(self) -> None:
        """Compile what it runs: a proposal for each number of rows that are ever verified, and two
        sizes of prompt chunks."""
        params, own, pool, features = self._shapes
        compiled = {}
        for bucket in self._prompt_buckets():
            batch, _ = self._inputs(bucket, Plan())
            program = self._programs.catch_up_program(params, own, pool, features, batch)
            compiled[bucket] = self._loader.compile(program)
        for bucket in self._proposal_buckets():
            batch, sampling = self._inputs(bucket, Plan())
            wanted = np.zeros(bucket.num_rows, np.int32)
            program = self._programs.propose_program(
                params, own, pool, features, batch, sampling, wanted
            )
            compiled[bucket] = self._loader.compile(program)
        self._compiled = compiled

    def run_prompts(self, plan: Plan) -> None:
        """See Drafter."""
        buckets = self._prompt_buckets()
        bucket = pick_bucket(buckets, 0, len(plan.prefill), plan.num_prefill_tokens)
        batch, _ = self._inputs(bucket, plan)
        self._pool = self._compiled[bucket](*self._leaves, self._pool, self._features(), batch)

    def draft(self, views: Sequence[View], most: Sequence[int]) -> list[list[int]]:
        """See Drafter."""
        plan = Plan(
            decode=tuple(
                Scheduled(view.own, view.own.num_computed, view.own.num_uncomputed, True)
                for view in views
            )
        )
        bucket = pick_bucket(self._proposal_buckets(), len(views), 0, 0, self.most_pending)
        batch, sampling = self._inputs(bucket, plan)
        wanted = np.zeros(bucket.num_rows, np.int32)
        wanted[: len(views)] = most
        drafts, self._pool = self._compiled[bucket](
            *self._leaves, self._pool, self._features(), batch, sampling, wanted
        )
        found: list[list[int]] = np.asarray(drafts)[: len(views)].tolist()
        for view in views:
            view.own.num_computed = view.own.num_tokens
        return found

    def _prompt_buckets(self) -> list[Bucket]:
        """The prompt chunks of the smallest and the largest mixed shape, without their decode
        rows; ascending."""
        mixed = [bucket for bucket in self._shape.buckets if bucket.prefill_tokens]
        chosen = [
            Bucket(0, 1, bucket.prefill_rows, bucket.prefill_tokens)
            for bucket in (mixed[0], mixed[-1])
        ]
        return list(dict.fromkeys(chosen))

    def _proposal_buckets(self) -> list[Bucket]:
        rows = {bucket.decode_rows for bucket in self._shape.buckets if bucket.width > 1}
        return [Bucket(number, self.most_pending, 0, 0) for number in sorted(rows)]

    def _inputs(self, bucket: Bucket, plan: Plan) -> tuple[StepBatch, SamplingBatch]:
        """The step's arrays. Sampling is for the first draft of each row."""
        batch = build_batch(
            plan,
            bucket,
            num_groups=1,
            pages_per_row=self._shape.pages_per_row,
            page_size=self._shape.page_size,
        )
        return batch, build_sampling(plan, Bucket(bucket.num_rows, 1, 0, 0))
