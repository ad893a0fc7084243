"""Heads and the target that they read, put together."""

import jax
from jax.sharding import Mesh

from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.proposers.device_proposer import Drafter
from jaxserve.engine.proposers.draft_checks import check_heads
from jaxserve.engine.proposers.feature_draft import FeatureHeads
from jaxserve.engine.proposers.feature_programs import FeaturePrograms, Target
from jaxserve.engine.proposers.medusa import MedusaHeads
from jaxserve.engine.proposers.medusa_programs import MedusaPrograms
from jaxserve.engine.runner import Runner
from jaxserve.loading.drafts import LoadedDraft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.drafts.base import FeatureDraft


def make_heads(
    draft: LoadedDraft,
    model: LoadedModel,
    runner: Runner,
    ops: tuple[Ops, Ops],
    shape: EngineShape,
    mesh: Mesh,
    loader: ProgramLoader,
    num_drafts: int,
) -> Drafter:
    """The drafter of heads that read the model which `runner` runs.

    ops: the target's and the draft's. num_drafts: of a request in a step at most.
    Raises InvalidRequestError if they do not fit.
    """
    check_heads(draft, model, num_drafts)
    target = Target(model.model, model.config, ops[0], model.vocab_size)

    def features() -> jax.Array:
        kept = runner.pool.features
        assert kept is not None, "the pool keeps no features for the heads"
        return kept

    if isinstance(draft.draft, FeatureDraft):
        programs = FeaturePrograms(
            target, draft.draft, draft.config, ops[1], shape.page_size, num_drafts, mesh
        )
        return FeatureHeads(programs, runner.params, draft.params, features, shape, loader)
    guesses = MedusaPrograms(target, draft.config, mesh)
    return MedusaHeads(guesses, runner.params, draft.params, features, shape, loader)
