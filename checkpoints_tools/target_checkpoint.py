"""A target as training needs it: plain float32 weights, and its config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.open_checkpoint import open_checkpoint
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel

_LEFT_OUT = ("_name_or_path", "transformers_version", "quantization_config", "torch_dtype")


@dataclass(frozen=True)
class Target:
    """name: as the user gave it. json_config: config.json's keys, also of a GGUF file, without
    those about how its weights are packed."""

    name: str
    path: Path
    model: LoadedModel
    json_config: Mapping[str, Any]


def load_target(name: str, tell: Callable[[str], None]) -> Target:
    """Raises ModelLoadError and PullError as `load_model` does."""
    path, config, _ = open_checkpoint(name)
    model = load_model(name, dtype="float32", progress=tell)
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    return Target(name, path, model, kept)
