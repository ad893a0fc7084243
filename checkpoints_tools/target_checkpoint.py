"""A target as training needs it: plain float32 weights, and its config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.hub import resolve
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel

_PLAIN_RESULTS = ("_name_or_path", "transformers_version", "quantization_config", "torch_dtype")


@dataclass(frozen=True)
class Target:
    """name: as the user gave it. json_config: config.json's keys, also of a GGUF file, without
    those about how its weights are packed."""

    name: str
    path: Path
    model: LoadedModel
    json_config: Mapping[str, Any]


def load_target(name: str, tell: Callable[[str], None], model_file: str | None = None) -> Target:
    """Raises ModelLoadError and PullError as `load_model` does."""
    path = resolve(name)
    model = load_model(name, dtype="float32", model_file=model_file, progress=tell)
    config = read_json_object(path / "config.json") if path.is_dir() else hf_config(GGUFFile(path))
    kept = {key: value for key, value in config.items() if key not in _PLAIN_RESULTS}
    return Target(name, path, model, kept)
