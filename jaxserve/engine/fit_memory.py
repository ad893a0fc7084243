"""A KV pool as large as a GPU has room for, found before anything is allocated.

What a step takes is known once it is compiled, and it is compiled for a pool of some size; but it
does not depend on that size, which only page numbers see. So the largest step is compiled for a
pool that is a little too large, and the pool is made of what weights, state and that step leave.
"""

from dataclasses import replace
from functools import partial

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core.buckets import largest_bucket
from jaxserve.core.features import FeatureForm
from jaxserve.core.gpu_memory import usable_memory
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.core.program_memory import tree_bytes
from jaxserve.engine.engine_shape import engine_shape
from jaxserve.engine.memory_plan import pool_budget
from jaxserve.engine.proposers.draft_checks import Draft, draft_kv_spec
from jaxserve.engine.step_cost import StepPrograms
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling import make_state


def fit_to_device(
    model: LoadedModel,
    config: EngineConfig,
    kv_spec: KVSpec,
    ops: Ops,
    mesh: Mesh,
    loader: ProgramLoader,
    draft: Draft | None = None,
    features: FeatureForm | None = None,
) -> EngineConfig:
    """The settings, with a kv_memory that fills the device; as they are on a CPU, and where they
    say how large the pool is. draft, features: what drafts, and what it reads of the model.
    Raises InvalidRequestError if nothing is left for a pool."""
    if config.kv_memory is not None or config.num_pages is not None:
        return config
    usable = usable_memory(mesh.devices.flat[0])
    if usable is None:
        return config
    return fill_memory(model, config, kv_spec, ops, mesh, loader, usable, draft, features)


def fill_memory(
    model: LoadedModel,
    config: EngineConfig,
    kv_spec: KVSpec,
    ops: Ops,
    mesh: Mesh,
    loader: ProgramLoader,
    usable: int,
    draft: Draft | None = None,
    features: FeatureForm | None = None,
) -> EngineConfig:
    """As `fit_to_device`, for a device of so many bytes."""
    slots, vocab_size = config.max_batch_rows + 1, model.vocab_size
    budget = partial(
        pool_budget,
        usable,
        weights=tree_bytes(model.params) + (0 if draft is None else tree_bytes(draft.params)),
        sampling_state=tree_bytes(jax.eval_shape(lambda: make_state(slots, vocab_size))),
    )
    too_large = replace(config, kv_memory=budget(temporaries=0))
    draft_spec = None if draft is None else draft_kv_spec(draft)
    shape = engine_shape(model, too_large, kv_spec, None, draft_spec, features)
    steps = StepPrograms(model, shape, ops, mesh, loader)
    temporaries = steps.temporaries(largest_bucket(shape.buckets))
    return replace(config, kv_memory=budget(temporaries=temporaries))
