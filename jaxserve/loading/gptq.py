"""GPTQ checkpoints (arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

Codes are packed along the inputs, zero points along the outputs. Files of the format "gptq" (v1)
store every zero point minus one, "gptq_v2" as it is. Some writers label one as the other: where
the quantization is symmetric the right zero point is known, so the stored numbers tell.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.packed_codes import (
    columns_by_group,
    grouped_array,
    grouped_shape,
    unpack_words,
)
from jaxserve.loading.packed_layer import PackedLayer, setting
from pallas_kernels.quantized_matmul.array import QuantizedArray

logger = logging.getLogger(__name__)

BITS = (2, 3, 4, 8)
MAX_GROUP = 1 << 20
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a 1 in every code of a word


def layer_format(settings: Mapping[str, Any]) -> "GPTQ":
    """The format of config.json's settings. Raises ModelLoadError for what is not supported."""
    bits = setting(settings, "bits", None, BITS)
    if setting(settings, "is_marlin_format", False, (False, True)):
        raise ModelLoadError("quantization: Marlin's own order of weights is not supported")
    stored = settings.get("checkpoint_format", settings.get("format", "gptq"))
    stored = setting({"checkpoint_format": stored}, "checkpoint_format", None, ("gptq", "gptq_v2"))
    setting(settings, "pack_dtype", "int32", ("int32",))
    return GPTQ(
        bits=bits,
        group_size=group_size(settings, "group_size"),
        symmetric=setting(settings, "sym", True, (True, False)),
        zero_offset=1 if stored == "gptq" else 0,
    )


def group_size(settings: Mapping[str, Any], key: str) -> int:
    """Inputs that share a scale; -1: all of them."""
    size = settings.get(key, -1)
    if type(size) is not int or not (size == -1 or 1 <= size <= MAX_GROUP):
        raise ModelLoadError(f"quantization: {key} is {str(size)[:40]}; want -1 or 1 and more")
    return size


@dataclass(frozen=True)
class GPTQ:
    """A LayerFormat. zero_offset: what is added to the stored zero points."""

    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int
    markers = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    ignored = ()

    @property
    def title(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def is_packed(self, layer: PackedLayer) -> bool:
        return layer.has("qweight")

    def shape(self, layer: PackedLayer) -> tuple[int, int]:
        words, N = layer.shape("qweight")
        K = words * 32 // self.bits
        if words * 32 % self.bits or K % 32 or N * self.bits % 32:
            raise layer.refusal(
                f"qweight has the shape {[words, N]}, which are no whole words of {self.bits}-bit "
                "codes"
            )
        groups = layer.shape("scales")[0]
        wanted = 1 if self.group_size == -1 else -(-K // self.group_size)
        if groups != wanted:
            raise layer.refusal(
                f"scales are for {groups} groups, but {K} inputs in groups of {self.group_size} "
                f"are {wanted}; qweight has {self.bits}-bit codes by config.json"
            )
        layer.want_shape("scales", (groups, N))
        layer.want_shape("qzeros", (groups, N * self.bits // 32))
        if self._has_g_idx(layer):
            layer.want_shape("g_idx", (K,))
        return N, K

    def read(self, layer: PackedLayer) -> QuantizedArray:
        _, K = self.shape(layer)
        words = layer.raw("qweight", "I32", "U32")
        codes = unpack_words(np.ascontiguousarray(words.T), self.bits)  # [N, K]
        zeros = self._zeros(layer)  # [G, N]
        scales = layer.scales("scales")
        groups = self._group_of_input(layer, K)
        return grouped_array(layer, codes, self.bits, scales.T, zeros.T, groups)

    def packed_shape(self, layer: PackedLayer) -> QuantizedArray:
        """Symmetric 8-bit codes are taken to have no zero points, which read() sees."""
        N, K = self.shape(layer)
        num_groups = layer.shape("scales")[0]
        perm, _, group = columns_by_group(layer, self._group_of_input(layer, K), num_groups)
        name, has_zeros = ("int8", not self.symmetric) if self.bits == 8 else ("int4", True)
        return grouped_shape(name, (N, K), group, has_zeros=has_zeros, perm=perm)

    def _group_of_input(self, layer: PackedLayer, K: int) -> np.ndarray:
        if self._has_g_idx(layer):
            return layer.raw("g_idx", "I32", "I64").astype(np.int64)
        return np.arange(K) // (K if self.group_size == -1 else self.group_size)

    def _zeros(self, layer: PackedLayer) -> np.ndarray:
        words = layer.raw("qzeros", "I32", "U32").view(np.uint32)
        stored = unpack_words(words, self.bits)
        if self._zero_offset(stored) == 0:
            return stored
        if self.bits == 3:
            return (stored + 1) & 7
        # One was subtracted from all codes of a word at once, so a zero point of 0 has borrowed
        # from the next: one is added in the same way.
        return unpack_words(words + np.uint32(_ONES[self.bits]), self.bits)

    def _has_g_idx(self, layer: PackedLayer) -> bool:
        """Whether groups are listed; without act-order some writers leave the list empty."""
        return layer.has("g_idx") and layer.folder.shape(f"{layer.name}.g_idx") != (0,)

    def _zero_offset(self, stored: np.ndarray) -> int:
        """The offset by the label, or by the numbers where those prove the label wrong."""
        if not self.symmetric:
            return self.zero_offset
        middle = 1 << (self.bits - 1)
        proven = middle - int(stored.flat[0])
        if proven == self.zero_offset or proven not in (0, 1) or (stored != stored.flat[0]).any():
            return self.zero_offset
        logger.warning(
            "zero points are stored as by %s although config.json says otherwise; going by them",
            "gptq" if proven else "gptq_v2",
        )
        return proven
