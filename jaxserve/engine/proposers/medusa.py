"""Drafts of Medusa heads: each guesses one token further ahead, all of them at once.

They read the target's last hidden state of the newest token that was run, which the target's own
steps left in its pool (core/features.py), and keep nothing.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.core.buckets import Bucket
from jaxserve.core.mesh import place_params
from jaxserve.core.program_loader import CompiledProgram, Leaves, ProgramLoader
from jaxserve.core.step_batch import SamplingBatch
from jaxserve.engine.batch_builder import build_sampling
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.proposers.device_proposer import View
from jaxserve.engine.proposers.feature_draft import Features
from jaxserve.engine.proposers.medusa_programs import MedusaPrograms
from jaxserve.models.base import Params
from jaxserve.models.drafts.medusa import param_specs


class MedusaHeads:
    """A `Drafter`."""

    name = "medusa"
    first_token = 1  # the newest token that was run is the one before the last
    most_pending = sys.maxsize  # nothing is run, so nothing is behind
    prompt_shape = None

    def __init__(
        self,
        programs: MedusaPrograms,
        params: Params,
        own: Params,
        features: Features,
        shape: EngineShape,
        loader: ProgramLoader,
    ) -> None:
        """params: the target's, where they are used; own: the heads'. shape: the target's."""
        self.most_drafts = programs.config.num_heads
        self._programs = programs
        self._shape = shape
        self._loader = loader
        self._features = features
        self._params = params, place_params(programs.mesh, own, param_specs(programs.config))
        self._leaves = tuple(Leaves(jax.tree.leaves(tree)) for tree in self._params)
        self._shapes: tuple[Any, ...] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            (*self._params, features()),
        )
        self._compiled: dict[Bucket, CompiledProgram] = {}

    @property
    def is_loaded(self) -> bool:
        return bool(self._compiled)

    def load(self) -> None:
        """Compile what it runs: for each number of rows that are ever verified."""
        rows = {bucket.decode_rows for bucket in self._shape.buckets if bucket.width > 1}
        compiled = {}
        for bucket in (Bucket(number, self.most_drafts, 0, 0) for number in sorted(rows)):
            slots, sampling = self._inputs(bucket, ())
            params, own, features = self._shapes
            program = self._programs.program(params, own, features, slots, sampling)
            compiled[bucket] = self._loader.compile(program)
        self._compiled = compiled

    def run_prompts(self, plan: Plan) -> None:
        """See Drafter: never asked for."""
        raise AssertionError(f"Medusa's heads run no prompts, got {len(plan.prefill)}")

    def draft(self, views: Sequence[View], most: Sequence[int]) -> list[list[int]]:
        """See Drafter: what every head guesses, whatever is wanted."""
        del most
        bucket = min(
            (bucket for bucket in self._compiled if bucket.decode_rows >= len(views)),
            key=lambda bucket: bucket.decode_rows,
        )
        slots, sampling = self._inputs(bucket, views)
        drafts = self._compiled[bucket](*self._leaves, self._features(), slots, sampling)
        found: list[list[int]] = np.asarray(drafts)[: len(views)].tolist()
        return found

    def reset(self) -> None:
        """See Drafter: nothing is kept."""

    def _inputs(self, bucket: Bucket, views: Sequence[View]) -> tuple[np.ndarray, SamplingBatch]:
        """(slots [rows] of the newest token that was run, settings of every draft)."""
        size = self._shape.page_size
        slots = np.zeros(bucket.num_rows, np.int32)
        for row, view in enumerate(views):
            newest = view.own.num_tokens - 2
            slots[row] = view.own.pages[0][newest // size] * size + newest % size
        plan = Plan(
            decode=tuple(Scheduled(view.own, view.own.num_tokens - 1, 1, True) for view in views)
        )
        return slots, build_sampling(plan, bucket)
