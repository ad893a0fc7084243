"""The second model that a configuration asks for: one that drafts."""

from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel


def load_draft(
    config: EngineConfig, layout: str | None, progress: Callable[[str], None]
) -> LoadedModel | None:
    """The draft model of `config.speculative`, or None if the method needs none.

    layout: how packed weights are kept. Raises as `load_model` does.
    """
    speculative = config.speculative
    if speculative is None or speculative.method != "draft-model":
        return None
    assert speculative.model is not None, "the configuration was not checked"
    progress(f"loading the draft model {speculative.model}")
    return load_model(
        speculative.model,
        dtype=config.dtype,
        progress=progress,
        weight_layout=layout,
        quantization=speculative.quantization,
    )
