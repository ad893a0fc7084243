"""Architecture name -> ModelDef. Names are config.json's `architectures` entries."""

from importlib import import_module

from jaxserve.errors import ModelLoadError
from jaxserve.models.base import ModelDef

_FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "jaxserve.models.llama",
    "MistralForCausalLM": "jaxserve.models.llama",
    "Qwen2ForCausalLM": "jaxserve.models.llama",
    "Qwen3ForCausalLM": "jaxserve.models.llama",
    "Gemma3ForCausalLM": "jaxserve.models.gemma3",
}


def architectures() -> tuple[str, ...]:
    """The architecture names that have a built-in model."""
    return tuple(_FAMILIES)


def find_model(architecture: str) -> ModelDef:
    """The built-in ModelDef of an architecture; ModelLoadError lists what exists otherwise."""
    module = _FAMILIES.get(architecture)
    if module is None:
        raise ModelLoadError(
            f"architecture {architecture!r} has no built-in model; built in are "
            f"{', '.join(_FAMILIES)}. Pass your own with --model-file"
        )
    model = import_module(module).MODEL
    assert isinstance(model, ModelDef)
    return model


def is_built_in(model: ModelDef) -> bool:
    """Whether it is one of these families, as they are."""
    return any(import_module(module).MODEL is model for module in set(_FAMILIES.values()))
