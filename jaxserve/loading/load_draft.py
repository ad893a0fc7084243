"""What a configuration asks for to draft with: a second model, or heads that read the target."""

from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.errors import ModelLoadError
from jaxserve.loading import drafts
from jaxserve.loading.load import load_model, param_dtype
from jaxserve.loading.loaded_model import LoadedModel

_HEADS = ("medusa", "eagle", "eagle3", "mtp")


def load_draft(
    config: EngineConfig,
    target: LoadedModel,
    target_path: str | None,
    layout: str | None,
    progress: Callable[[str], None],
) -> LoadedModel | drafts.LoadedDraft | None:
    """The draft of `config.speculative` for a target, or None if the method needs none.

    target_path: as the user named the target, where MTP modules are if the configuration does not
    say; None: it was not read from anywhere. layout: how packed weights are kept.
    Raises as `load_model` does.
    """
    speculative = config.speculative
    if speculative is None or speculative.method not in ("draft-model", *_HEADS):
        return None
    method, path = speculative.method, speculative.checkpoint or target_path
    if path is None:
        raise ModelLoadError(
            f"speculative_config: {method} is read from the served checkpoint, and this model was "
            "not read from one; name it under 'model'"
        )
    if method == "draft-model":
        progress(f"loading the draft model {path}")
        return load_model(
            path,
            dtype=config.dtype,
            progress=progress,
            weight_layout=layout,
            quantization=speculative.quantization,
        )
    progress(f"loading the {method} heads of {path}")
    draft = drafts.load_draft(
        path,
        target.config,
        dtype=param_dtype(config.dtype),
        weight_layout=layout,
        quantization=speculative.quantization,
        progress=progress,
    )
    if draft.draft.name != method:
        raise ModelLoadError(
            f"speculative_config: method is {method}, but the tensors in {path} are of the method "
            f"{draft.draft.name}; name that one, or another checkpoint"
        )
    return draft
