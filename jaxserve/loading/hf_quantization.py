"""Quantised Hugging Face folders: which way config.json names, and their tensors by logical names.

A packed layer's tensors (X.qweight, X.scales ...) are presented as the one matrix X.weight that
they stand for, so that everything above sees the names and shapes of the unquantised model.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading import awq, compressed_tensors, fp8_checkpoint, gptq
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.packed_codes import expand
from jaxserve.loading.packed_layer import LayerFormat, PackedLayer
from jaxserve.loading.safetensors_file import SafetensorsFolder, shown
from jaxserve.loading.tensor_source import TensorSource
from pallas_kernels.quantized_matmul.array import QuantizedArray

logger = logging.getLogger(__name__)

LEGACY_NAME = "quantize_config.json"  # of GPTQ folders from before config.json had the settings

_METHODS: Mapping[str, Callable[[Mapping[str, Any]], LayerFormat]] = {
    "gptq": gptq.layer_format,
    "awq": awq.layer_format,
    "compressed-tensors": compressed_tensors.layer_format,
    "fp8": fp8_checkpoint.layer_format,
    "fbgemm_fp8": fp8_checkpoint.layer_format,
}


def open_quantized(folder: Path, config: Mapping[str, Any]) -> TensorSource:
    """The tensors of a folder, by what `config` (config.json) says about their quantization.

    A folder that names none is a plain one. Only headers are read. Raises ModelLoadError for a
    way of quantising that is not supported, and for a layer whose tensors do not fit each other.
    """
    settings = _settings(folder, config)
    if settings is None:
        return SafetensorsFolder(folder)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelLoadError(
            f"{folder / 'config.json'}: the weights are quantised by {str(method)[:40]!r}; "
            f"supported: {', '.join(_METHODS)}. Take one of these, a GGUF, or the unquantised "
            "checkpoint with --quantization int8 or int4"
        )
    try:
        layer_format = _METHODS[method](settings)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from error
    return QuantizedFolder(SafetensorsFolder(folder), layer_format)


def may_be_left_over(source: TensorSource, name: str) -> bool:
    """Whether a model may leave this tensor unread: a packed layer's bias that is all zeros.

    GPTQ writers add such biases to layers that have none in the model.
    """
    return isinstance(source, QuantizedFolder) and source.is_empty_bias(name)


class QuantizedFolder:
    """A TensorSource over a folder in which some layers are packed as `layer_format` says."""

    def __init__(self, folder: SafetensorsFolder, layer_format: LayerFormat) -> None:
        self.location = folder.location
        self._folder = folder
        self._format = layer_format
        self._layers = _packed_layers(folder, layer_format)
        if not self._layers:
            raise ModelLoadError(
                f"{folder.location}: config.json says that the weights are quantised "
                f"({layer_format.title}), but no layer is; download the model again"
            )
        hidden = {
            f"{layer.name}.{part}" for layer in self._layers.values() for part in layer_format.parts
        }
        plain = [
            name
            for name in folder.names()
            if name not in hidden and name.rpartition(".")[2] not in layer_format.ignored
        ]
        twice = next((name for name in plain if name in self._layers), None)
        if twice is not None:
            raise ModelLoadError(f"{folder.location}: {shown(twice)} is there plain and packed")
        self._names = [*plain, *self._layers]
        self._shapes = {name: layer_format.shape(layer) for name, layer in self._layers.items()}
        logger.info("%s: %d packed layers", layer_format.title, len(self._layers))

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self._folder.shape(name)

    def load(self, name: str) -> np.ndarray:
        if name not in self._layers:
            return self._folder.load(name)
        return expand(self.load_packed(name))

    def load_packed(self, name: str) -> QuantizedArray:
        if name not in self._layers:
            return self._folder.load_packed(name)
        return self._format.read(self._layers[name])

    def packed_shape(self, name: str) -> QuantizedArray:
        if name not in self._layers:
            return self._folder.packed_shape(name)
        return self._format.packed_shape(self._layers[name])

    def label(self, name: str) -> str:
        if name not in self._layers:
            return self._folder.label(name)
        layer = self._layers[name]
        marker = next(part for part in self._format.markers if layer.has(part))
        return f"{layer.name}.{marker}"

    def is_empty_bias(self, name: str) -> bool:
        """Whether this is the bias of a packed layer and all zeros."""
        layer, _, part = name.rpartition(".")
        return part == "bias" and f"{layer}.weight" in self._layers and not self.load(name).any()


def _settings(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization's settings wherever writers have put them, or None."""
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if isinstance(settings, Mapping):
            return settings
        if settings is not None:
            raise ModelLoadError(f"{folder / 'config.json'}: {key} is no object")
    if (folder / LEGACY_NAME).exists():
        return {"quant_method": "gptq"} | read_json_object(folder / LEGACY_NAME)
    return None


def _packed_layers(folder: SafetensorsFolder, layer_format: LayerFormat) -> dict[str, PackedLayer]:
    """Logical name -> layer, for every packed layer of the folder."""
    layers = {}
    for name in folder.names():
        of, _, part = name.rpartition(".")
        if part in layer_format.markers:
            layer = PackedLayer(folder, of)
            if layer_format.is_packed(layer):
                layers[f"{of}.weight"] = layer
    return layers
