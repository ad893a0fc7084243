"""What can draft for a model, and whether it fits."""

from jaxserve.core.backends import refusal
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import STACKED
from jaxserve.core.kv_spec import KVSpec
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.drafts import LoadedDraft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Params
from jaxserve.models.drafts.base import FeatureDraft
from jaxserve.models.drafts.medusa import MedusaConfig

type Draft = LoadedModel | LoadedDraft  # a model of its own, or heads that read the target


def draft_kv_spec(draft: Draft) -> KVSpec | None:
    """Of the keys and values it keeps beside the target's; None: it keeps none."""
    if isinstance(draft, LoadedModel):
        return draft.model.kv_spec(draft.config)
    return draft.draft.kv_spec(draft.config) if isinstance(draft.draft, FeatureDraft) else None


def whole_table(model: LoadedModel, kv_spec: KVSpec) -> int:
    """The target's first table group without a window, under whose pages drafts keep what is
    theirs. Raises InvalidRequestError if every group has one."""
    windows = kv_layout(kv_spec).windows
    if None not in windows:
        _refuse(f"every layer of {model.name} has a window; take ngram or suffix")
    return windows.index(None)


def check_draft_model(draft: LoadedModel, model: LoadedModel, context: int) -> None:
    """Whether a model can draft for another.

    context: tokens that a request may have. Raises InvalidRequestError saying what does not fit.
    """
    if draft.vocab_size != model.vocab_size:
        _refuse(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens and {model.name} of "
            f"{model.vocab_size}; drafts are token ids, so take a draft model of the same family"
        )
    if draft.max_model_len < context:
        _refuse(
            f"{draft.name} has a context of {draft.max_model_len} tokens, less than the "
            f"{context} that requests may have; lower --max-model-len, or take another"
        )
    if kv_layout(draft.model.kv_spec(draft.config)).num_tables > 1:
        _refuse(f"{draft.name} mixes windows, which draft models cannot; take one without")


def check_heads(draft: LoadedDraft, model: LoadedModel, num_drafts: int) -> None:
    """Whether heads can draft for a model they were loaded for, so many tokens in a row.

    Raises InvalidRequestError saying what does not fit.
    """
    if isinstance(draft.config, MedusaConfig):
        heads = draft.config.num_heads
        if num_drafts > heads:
            _refuse(
                f"num_speculative_tokens is {num_drafts} and {draft.name} has {heads} heads, one "
                f"for each; give at most {heads}"
            )
    elif embedding_table(model.params) is None:
        _refuse(
            f"the params of {model.name} have no table 'embed', whose rows {draft.draft.name} "
            "reads; take medusa, a draft-model, ngram or suffix"
        )


def check_kernels(draft: Draft, kv_spec: KVSpec, backend: str, shape: EngineShape) -> None:
    """Whether the backend's kernels take what a draft keeps. Raises InvalidRequestError."""
    problem = None
    if backend in STACKED:
        problem = refusal(kv_spec, shape.dtype, shape.page_size, backend)
    if problem is not None:
        _refuse(f"{draft.name} cannot draft on the backend {backend}: {problem}")


def embedding_table(params: Params) -> Params | None:
    """A target's token embeddings [V, E], which heads read as they are, unscaled."""
    return params.get("embed") if isinstance(params, dict) else None


def _refuse(what: str) -> None:
    raise InvalidRequestError(f"speculative_config: {what}", "speculative_config")
