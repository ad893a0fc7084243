"""From what a user names as a model to everything needed to serve it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ModelLoadError
from jaxserve.loading.assemble import Progress, assemble, random_params
from jaxserve.loading.chat_template import ChatTemplate, template_from_folder, template_from_gguf
from jaxserve.loading.generation_settings import (
    folder_eos_ids,
    folder_sampling_defaults,
    gguf_eos_ids,
    gguf_sampling_defaults,
)
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.loading.hf_quantization import open_quantized
from jaxserve.loading.hf_tokenizer import tokenizer_from_folder
from jaxserve.loading.hub import resolve
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.quantize_on_load import QuantizingSource
from jaxserve.loading.tensor_source import TensorSource
from jaxserve.loading.tokenizer import Tokenizer
from jaxserve.models.base import Config, ModelDef
from jaxserve.models.registry import find_model
from jaxserve.models.user_file import load_model_file

DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class _Checkpoint:
    """What either format holds. The tensors are opened last: random weights need none."""

    config: Mapping[str, Any]  # with config.json's keys
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float | int]
    open_tensors: Callable[[], TensorSource]


def param_dtype(dtype: str) -> str:
    """The parameters' type that a user's dtype stands for. Raises ModelLoadError for others."""
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype is {dtype[:40]!r}; choose {', '.join(DTYPES)}")
    if dtype == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return dtype


def load_model(
    name_or_path: str,
    *,
    dtype: str = "float32",
    model_file: str | None = None,
    random_weights_seed: int | None = None,
    progress: Progress | None = None,
    weight_layout: str | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a pulled model by name, a .gguf file, or a Hugging Face folder with safetensors.

    dtype: of the parameters: float32, bfloat16, or auto (bfloat16 except on CPU). model_file: a
    Python file that ends in MODEL, used instead of the built-in family. random_weights_seed: draw
    the weights from the model's specs instead of reading them. progress: is told what was done,
    how long it took, and how far a long phase is. weight_layout: None expands packed weights to
    plain arrays; "rows" or "panels" keeps them packed (see assemble). quantization: int8 or int4
    packs a plain checkpoint's matrices while they are read, which needs a weight_layout.

    Raises ModelLoadError, which names file and tensor, and PullError for an unknown name.
    """
    tell = progress or _silent
    dtype = param_dtype(dtype)
    if quantization is not None and weight_layout is None:
        raise ModelLoadError(f"quantization {quantization[:40]!r} needs weights that stay packed")
    path = resolve(name_or_path)
    with _phase(tell, f"read header and tokenizer of {path.name}"):
        checkpoint = _open_folder(path) if path.is_dir() else _open_gguf(path)
        model = (
            load_model_file(model_file) if model_file else built_in_model(checkpoint.config, path)
        )
        config = model_config(model, checkpoint.config, path)
    if random_weights_seed is not None:
        with _phase(tell, f"drew {dtype} weights from seed {random_weights_seed}"):
            params = random_params(
                model, config, random_weights_seed, dtype, weight_layout, quantization
            )
    else:
        with _phase(tell, _how_loaded(dtype, weight_layout, quantization)):
            source = checkpoint.open_tensors()
            if quantization is not None:
                source = QuantizingSource(source, quantization)
            params = assemble(model, config, source, dtype, progress, weight_layout)
    return LoadedModel(
        name=served_name(name_or_path, path),
        model=model,
        config=config,
        params=params,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        eos_token_ids=checkpoint.eos_token_ids,
        vocab_size=min(config.vocab_size, checkpoint.tokenizer.vocab_size),
        max_model_len=config.max_position_embeddings,
        sampling_defaults=checkpoint.sampling_defaults,
    )


def _how_loaded(dtype: str, weight_layout: str | None, quantization: str | None) -> str:
    if weight_layout is None:
        return f"loaded weights as {dtype}"
    return f"loaded weights packed{f' as {quantization}' if quantization else ''}"


def _open_gguf(path: Path) -> _Checkpoint:
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"{path}: want a .gguf file, or a folder with config.json and .safetensors files"
        )
    file = GGUFFile(path)
    config = hf_config(file)
    tokenizer = _naming(path, lambda: tokenizer_from_gguf(file.metadata))
    template = _naming(path, lambda: template_from_gguf(file.metadata, tokenizer))
    return _Checkpoint(
        config=config,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=_naming(path, lambda: gguf_eos_ids(file.metadata, tokenizer, template)),
        sampling_defaults=_naming(path, lambda: gguf_sampling_defaults(file.metadata)),
        open_tensors=lambda: GGUFTensors(
            file, config["num_attention_heads"], config["num_key_value_heads"]
        ),
    )


def _open_folder(path: Path) -> _Checkpoint:
    config = read_json_object(path / "config.json")
    tokenizer = _naming(path, lambda: tokenizer_from_folder(path))
    return _Checkpoint(
        config=config,
        tokenizer=tokenizer,
        chat_template=_naming(path, lambda: template_from_folder(path, tokenizer)),
        eos_token_ids=folder_eos_ids(config, path, tokenizer),
        sampling_defaults=folder_sampling_defaults(path),
        open_tensors=lambda: open_quantized(path, config),
    )


def built_in_model(config: Mapping[str, Any], path: Path) -> ModelDef:
    """The model of a config.json's architecture; path is for errors."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(
            f"{path}: config.json names no architectures; add it, or pass --model-file"
        )
    return _naming(path, lambda: find_model(names[0]))


def model_config(model: ModelDef, config: Mapping[str, Any], path: Path) -> Config:
    """The family's own configuration; a model file's mistakes get its name instead of a trace."""
    try:
        return model.config_from_hf(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: config_from_hf of model {model.name!r} failed: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _naming[Result](path: Path, read: Callable[[], Result]) -> Result:
    """Run `read`; an error that does not say which checkpoint it is about is told so."""
    try:
        return read()
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path}: {error}") from error


def served_name(name_or_path: str, path: Path) -> str:
    """What clients call the model: a pulled model's name as typed, else the file's or folder's."""
    if Path(name_or_path).expanduser() == path:
        # Not resolved where it has a name: in caches a readable name links to a checksum.
        own = path.name if path.name not in ("", "..") else path.resolve().name
        return own.removesuffix(".gguf")
    return name_or_path.removeprefix("hf:")


@contextmanager
def _phase(tell: Progress, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    tell(f"{what}: {time.monotonic() - start:.1f} s")


def _silent(text: str) -> None:
    del text
