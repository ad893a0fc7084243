"""Any checkpoint as a configuration and named tensors, unread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hf_quantization import open_quantized
from jaxserve.loading.hub import resolve
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.tensor_source import TensorSource


def open_checkpoint(name_or_path: str) -> tuple[Path, Mapping[str, Any], TensorSource]:
    """(where it is, config.json's keys, its tensors) of a model or a draft.

    Raises ModelLoadError for what is neither a .gguf file nor a folder, or is damaged.
    """
    path = resolve(name_or_path)
    if path.is_dir():
        config = read_json_object(path / "config.json")
        return path, config, open_quantized(path, config)
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"{path}: want a .gguf file, or a folder with config.json and .safetensors files"
        )
    file = GGUFFile(path)
    config = hf_config(file)
    tensors = GGUFTensors(file, config["num_attention_heads"], config["num_key_value_heads"])
    return path, config, tensors
