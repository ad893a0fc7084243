"""Whether a model can draft for another."""

from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_spec import KVSpec
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.loaded_model import LoadedModel


def check_draft(draft: LoadedModel, model: LoadedModel, kv_spec: KVSpec, context: int) -> int:
    """The target's table group whose pages a draft model's keys and values can lie beside.

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
    windows = kv_layout(kv_spec).windows
    if None not in windows:
        _refuse(f"every layer of {model.name} has a window; take ngram or suffix")
    return windows.index(None)


def _refuse(what: str) -> None:
    raise InvalidRequestError(f"speculative_config: {what}", "speculative_config")
