"""What a draft needs to read of its target: found by shapes, when the engine starts."""

import jax
import numpy as np

from jaxserve.core.features import FeatureForm, captured
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import pool_shapes
from jaxserve.core.ops import Ops
from jaxserve.engine.proposers.draft_checks import Draft, whole_table
from jaxserve.errors import ModelLoadError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.contract import PAGE_SIZE, PAGES, batch_shapes
from jaxserve.models.drafts.base import FeatureDraft


def target_features(
    draft: Draft | None, model: LoadedModel, ops: Ops, kv_dtype: np.dtype
) -> FeatureForm | None:
    """The features that the target's steps have to keep for `draft`; None: it reads none.

    Raises ModelLoadError if the model's forward does not give them, InvalidRequestError if there
    are no pages for them.
    """
    if draft is None or isinstance(draft, LoadedModel):
        return None
    kind = draft.draft
    names = kind.tap_names(draft.config) if isinstance(kind, FeatureDraft) else ()
    kv_spec = model.model.kv_spec(model.config)
    table = whole_table(model, kv_spec)
    layout = kv_layout(kv_spec)
    pool = pool_shapes(layout, PAGES, PAGE_SIZE, kv_dtype, ops.name)

    def features(params: object, batch: object, pool: object) -> jax.Array:
        hidden, taps, _ = model.model.forward(model.config, params, batch, pool, ops)  # type: ignore[arg-type]
        missing = [name for name in names if name not in taps]
        if missing:
            raise ModelLoadError(
                f"model {model.model.name!r} gives no tap {missing[0]!r}, which {draft.name} "
                f"({kind.name}) reads; its forward has to return it, see docs/models.md, or take "
                "another draft"
            )
        return captured(names, hidden, taps)

    shape = jax.eval_shape(features, model.params, batch_shapes(layout.num_tables), pool)
    return FeatureForm(names, shape.shape[1], shape.dtype.name, table)
