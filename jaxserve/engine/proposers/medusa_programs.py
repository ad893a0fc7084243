"""The program of Medusa heads: from a row's last feature to a guess of every head."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.core.features import read_features
from jaxserve.core.mesh import replicated
from jaxserve.core.program_loader import Program
from jaxserve.core.step_batch import SamplingBatch
from jaxserve.engine.proposers.feature_programs import Target
from jaxserve.models.base import Params
from jaxserve.models.drafts.medusa import MedusaConfig, heads
from jaxserve.sampling.drafting import draw_ahead


@dataclass(frozen=True)
class MedusaPrograms:
    """All fields are static: equal programs share traces."""

    target: Target
    config: MedusaConfig
    mesh: Mesh

    def guess(
        self,
        params: Params,
        own: Params,
        features: jax.Array,
        slots: jax.Array,
        sampling: SamplingBatch,
    ) -> jax.Array:
        """Each row's drafts [R, heads] int32.

        params, own: the target's and the heads'. features: of the target's pool. slots [R]: where
        the last token lies that was run; sampling: positions [R, heads] of the drafts.
        """

        def unembed(hidden: jax.Array) -> jax.Array:
            return self.target.logits(params, hidden)

        hidden = read_features(features, slots)
        logits = heads(self.config, own, hidden, unembed, self.target.ops)  # [heads, R, V]
        target = self.target
        return draw_ahead(logits.swapaxes(0, 1), sampling, target.vocab_size, target.ops.row_sum)

    def program(
        self, params: Params, own: Params, features: Any, slots: Any, sampling: SamplingBatch
    ) -> Program:
        """`guess` for this number of rows, of arrays or shapes; nothing is donated."""
        here = replicated(self.mesh)
        return Program(
            "draft_guess",
            self.guess,
            (params, own, features, slots, sampling),
            donated=range(0),
            result=here,
            shardings=here,
            identity=(self.target, self.config),
            keep=self.mesh.size == 1,
        )
