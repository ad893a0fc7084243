"""compressed-tensors checkpoints (llm-compressor): packed or plain integers, and 8-bit floats.

Which layers are packed, and how, is read off their tensors; config.json's groups say only what
could be meant, and every layer must fit one of them. So the patterns of names there (targets,
ignore) need no matching. Rounding of activations is not followed: they stay float.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.fp8_checkpoint import block_size
from jaxserve.loading.gptq import group_size
from jaxserve.loading.packed_codes import (
    columns_by_group,
    fp8_shape,
    grouped_array,
    grouped_shape,
    scaled_fp8,
    unpack_words,
)
from jaxserve.loading.packed_layer import PackedLayer, setting
from pallas_kernels.quantized_matmul.array import QuantizedArray

logger = logging.getLogger(__name__)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MAX_SCHEMES = 64
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Scheme:
    """How one group of config.json quantises weights: what shares a scale, None being all.

    kind: "int" or "float".
    """

    kind: str
    bits: int
    rows: int | None
    inputs: int | None

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many scales a matrix has down and across."""
        rows, inputs = self.sharing(shape)
        return -(-shape[0] // rows), -(-shape[1] // inputs)

    def sharing(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and inputs that share a scale."""
        return self.rows or shape[0], self.inputs or shape[1]


def layer_format(settings: Mapping[str, Any]) -> "CompressedTensors":
    """The format of config.json's settings. Raises ModelLoadError for what is not supported."""
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity:
        setting(sparsity, "format", "dense", ("dense",))
    if settings.get("transform_config"):
        raise ModelLoadError(
            "quantization: transform_config asks for rotations of activations, which are not "
            "supported; take a checkpoint without them"
        )
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not 1 <= len(groups) <= MAX_SCHEMES:
        raise ModelLoadError(f"quantization: want 1 to {MAX_SCHEMES} config_groups")
    default = settings.get("format", "dense")
    schemes = tuple(_scheme(group, default) for group in groups.values())
    if any(group.get("input_activations") for group in groups.values()):
        logger.info(
            "the checkpoint asks for 8-bit activations; they stay float, which is more exact"
        )
    return CompressedTensors(tuple(dict.fromkeys(schemes)))


def _scheme(group: Any, default: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelLoadError("quantization: a group of config_groups has no settings of weights")
    form = group.get("format") or default
    setting({"format": form}, "format", None, FORMATS)
    kind = setting(weights, "type", "int", ("int", "float"))
    bits = setting(weights, "num_bits", 8, (4, 8) if kind == "int" else (8,))
    size = group_size(weights, "group_size") if weights.get("group_size") is not None else -1
    default_strategy = "tensor" if weights.get("group_size") is None else "group"
    strategy = weights.get("strategy") or default_strategy
    strategy = setting({"strategy": strategy}, "strategy", None, _STRATEGIES)
    if strategy == "block":
        return Scheme(kind, bits, *block_size(weights.get("block_structure"), "block_structure"))
    by_group = strategy == "group" and size != -1
    return Scheme(kind, bits, None if strategy == "tensor" else 1, size if by_group else None)


@dataclass(frozen=True)
class CompressedTensors:
    """A LayerFormat. schemes: the different ones that layers may follow."""

    schemes: tuple[Scheme, ...]
    title = "compressed-tensors"
    markers = ("weight_packed", "weight")
    parts = (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx",
    )  # fmt: skip
    ignored = (
        "input_scale", "input_zero_point", "output_scale", "output_zero_point",
        "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point",
    )  # fmt: skip

    def is_packed(self, layer: PackedLayer) -> bool:
        if layer.has("weight_packed"):
            return True
        return layer.dtype("weight") == "I8" or layer.dtype("weight").startswith("F8_")

    def shape(self, layer: PackedLayer) -> tuple[int, int]:
        shape = _weight_shape(layer)
        self._scheme_of(layer, shape)
        if layer.has("weight_g_idx"):
            layer.want_shape("weight_g_idx", (shape[1],))
        return shape

    def read(self, layer: PackedLayer) -> QuantizedArray:
        N, K = shape = _weight_shape(layer)
        scheme = self._scheme_of(layer, shape)
        grid, (rows, inputs) = scheme.grid(shape), scheme.sharing(shape)
        scales = layer.scales("weight_scale").reshape(grid)
        if scheme.kind == "float":
            return scaled_fp8(layer, layer.raw("weight", "F8_E4M3"), scales, (rows, inputs))
        if layer.has("weight_packed"):
            bits, words = scheme.bits, layer.raw("weight_packed", "I32")
            codes = unpack_words(words, bits)[:, :K]
        else:
            bits, codes = 8, layer.raw("weight", "I8").view(np.uint8) ^ 0x80
        zeros = _zeros(layer, bits, grid)
        scales, zeros = (np.repeat(part, rows, axis=0)[:N] for part in (scales, zeros))
        return grouped_array(layer, codes, bits, scales, zeros, _groups(layer, K, inputs))

    def packed_shape(self, layer: PackedLayer) -> QuantizedArray:
        """8-bit integers with zero points are taken to need them, which read() sees."""
        _, K = shape = _weight_shape(layer)
        scheme = self._scheme_of(layer, shape)
        inputs = scheme.sharing(shape)[1]
        if scheme.kind == "float":
            return fp8_shape(layer, shape, inputs)
        groups = _groups(layer, K, inputs)
        perm, _, group = columns_by_group(layer, groups, scheme.grid(shape)[1])
        if scheme.bits == 4:
            return grouped_shape("int4", shape, group, perm=perm)
        has_zeros = layer.has("weight_zero_point")
        return grouped_shape("int8", shape, group, has_zeros=has_zeros, perm=perm)

    def _scheme_of(self, layer: PackedLayer, shape: tuple[int, int]) -> Scheme:
        """The first scheme that the layer's tensors fit. ModelLoadError if they fit none."""
        for scheme in self.schemes:
            if _fits(layer, shape, scheme):
                return scheme
        part = "weight_packed" if layer.has("weight_packed") else "weight"
        scale = layer.folder.shape(f"{layer.name}.weight_scale")
        raise layer.refusal(
            f"{part} {list(layer.shape(part))} of type {layer.dtype(part)[:40]} with weight_scale "
            f"{list(scale)} for the shape {list(shape)} fits none of the config_groups"
        )


def _weight_shape(layer: PackedLayer) -> tuple[int, int]:
    if not layer.has("weight_scale"):
        raise layer.refusal("the weight is quantised, but weight_scale is missing")
    if not layer.has("weight_packed"):
        N, K = layer.shape("weight")
        return N, K
    layer.want_shape("weight_shape", (2,))
    N, K = (int(size) for size in layer.raw("weight_shape", "I64", "I32"))
    rows, words = layer.shape("weight_packed")
    if rows != N or not 1 <= K <= 32 * words:
        raise layer.refusal(
            f"weight_shape is {[N, K]}, which does not fit weight_packed {[rows, words]}"
        )
    return N, K


def _fits(layer: PackedLayer, shape: tuple[int, int], scheme: Scheme) -> bool:
    """Whether types and shapes are those of the scheme; scales may leave out axes of one."""
    scale = layer.folder.shape(f"{layer.name}.weight_scale")
    if [size for size in scale if size != 1] != [size for size in scheme.grid(shape) if size != 1]:
        return False
    if layer.has("weight_packed"):
        words = -(-shape[1] * scheme.bits // 32)
        return scheme.kind == "int" and layer.shape("weight_packed") == (shape[0], words)
    return layer.dtype("weight") == ("I8" if scheme.kind == "int" else "F8_E4M3")


def _zeros(layer: PackedLayer, bits: int, grid: tuple[int, int]) -> np.ndarray:
    """Zero points of unsigned codes, uint8 in the shape of the scales."""
    if not layer.has("weight_zero_point"):
        return np.full(grid, 1 << (bits - 1), np.uint8)
    if layer.dtype("weight_zero_point") == "I32":  # packed, down the rows
        layer.want_shape("weight_zero_point", (-(-grid[0] * bits // 32), grid[1]))
        words = np.ascontiguousarray(layer.raw("weight_zero_point", "I32").T)
        return unpack_words(words, bits)[:, : grid[0]].T
    stored = layer.raw("weight_zero_point", "I8")
    if stored.size != grid[0] * grid[1]:
        raise layer.refusal(
            f"weight_zero_point has the shape {list(stored.shape)}, want {list(grid)}"
        )
    zeros = stored.reshape(grid).astype(np.int16) + (1 << (bits - 1))
    if zeros.min() < 0 or zeros.max() >= 1 << bits:
        raise layer.refusal(f"weight_zero_point is outside the range of {bits} bits")
    return zeros.astype(np.uint8)


def _groups(layer: PackedLayer, K: int, inputs: int) -> np.ndarray:
    """The group of every input. A list with -1 in it was never filled in."""
    if layer.has("weight_g_idx"):
        listed = layer.raw("weight_g_idx", "I32", "I64").astype(np.int64)
        if (listed != -1).all():
            return listed
    return np.arange(K) // inputs
