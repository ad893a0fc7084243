"""What `load_model` would load, from headers alone: no weight is read, no tokenizer is made."""

from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.loading.assemble import param_shapes
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hf_quantization import open_quantized
from jaxserve.loading.hub import resolve
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.load import built_in_model, model_config, served_name
from jaxserve.loading.tensor_source import TensorSource
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.models.user_file import load_model_file

_WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class DescribedModel:
    """params: the tree that would be on the device, with a ShapeDtypeStruct for every array.

    vocab_size: rows of the unembedding. source: where the shapes are from, for people.
    """

    name: str
    model: ModelDef
    config: Config
    params: Params
    source: str
    vocab_size: int
    max_model_len: int


def describe_model(
    name_or_path: str,
    *,
    dtype: str,
    weight_layout: str | None = None,
    quantization: str | None = None,
    model_file: str | None = None,
) -> DescribedModel:
    """Of a pulled model, a .gguf file or a folder with safetensors, as `load_model` takes them.

    A config.json, or a folder with no weights beside one, stands for a model drawn at random.
    Arguments and errors are those of `load_model`; dtype is float32 or bfloat16.
    """
    path = resolve(name_or_path)
    config_file = path / "config.json" if path.is_dir() else path
    if path.suffix == ".gguf" and not path.is_dir():
        file = GGUFFile(path)
        config = hf_config(file)
        read = f"headers of {path.name}"
    elif config_file.suffix == ".json":
        config = read_json_object(config_file)
        read = f"config.json and headers of {path.name}"
    else:
        raise ModelLoadError(
            f"{path}: want a .gguf file, a folder with config.json and .safetensors files, or a "
            "config.json"
        )
    model = load_model_file(model_file) if model_file else built_in_model(config, path)
    own = model_config(model, config, path)
    source: TensorSource | None
    if path.suffix == ".gguf" and not path.is_dir():
        source = GGUFTensors(file, config["num_attention_heads"], config["num_key_value_heads"])
    elif path.is_dir() and any(any(path.glob(kind)) for kind in _WEIGHT_FILES):
        source = open_quantized(path, config)
    else:
        source, read = None, f"{config_file.name} alone, weights drawn at random"
    return DescribedModel(
        name=_folder_name(path) if path.suffix == ".json" else served_name(name_or_path, path),
        model=model,
        config=own,
        params=param_shapes(model, own, source, dtype, weight_layout, quantization),
        source=read,
        vocab_size=own.vocab_size,
        max_model_len=own.max_position_embeddings,
    )


def _folder_name(config_file: Path) -> str:
    """A configuration is called what its folder is called."""
    return config_file.resolve().parent.name
