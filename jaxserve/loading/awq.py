"""AWQ checkpoints (arXiv:2306.00978), as AutoAWQ writes them: 4 bits, a zero point per group.

Version "gemm" packs eight outputs in a word, in an order of its own; version "gemv" packs eight
inputs, in order, and pads scales and zero points. The two cannot be told apart safely by shapes,
so config.json's word is taken and the shapes must agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.loading.gptq import group_size
from jaxserve.loading.packed_codes import grouped_array, grouped_shape, unpack_words
from jaxserve.loading.packed_layer import PackedLayer, setting
from pallas_kernels.quantized_matmul.array import QuantizedArray

_GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in the word of each of the eight outputs


def layer_format(settings: Mapping[str, Any]) -> "AWQ":
    """The format of config.json's settings. Raises ModelLoadError for what is not supported."""
    setting(settings, "bits", settings.get("w_bit"), (4,))
    setting(settings, "zero_point", True, (True,))
    version = settings.get("version", "gemm")
    version = version.lower() if isinstance(version, str) else version
    version = setting({"version": version}, "version", None, ("gemm", "gemv"))
    key = "group_size" if "group_size" in settings else "q_group_size"
    return AWQ(version=version, group_size=group_size(settings, key))


@dataclass(frozen=True)
class AWQ:
    """A LayerFormat."""

    version: str
    group_size: int
    markers = ("qweight",)
    parts = ("qweight", "qzeros", "scales")
    ignored = ()

    @property
    def title(self) -> str:
        return f"AWQ {self.version}, 4 bits"

    def is_packed(self, layer: PackedLayer) -> bool:
        return layer.has("qweight")

    def shape(self, layer: PackedLayer) -> tuple[int, int]:
        first, second = layer.shape("qweight")
        N, K = (second * 8, first) if self.version == "gemm" else (first, second * 8)
        group = self._group(K)
        if K % group:
            raise layer.refusal(f"{K} inputs are not whole groups of {group}")
        groups = K // group
        if self.version == "gemm":
            layer.want_shape("scales", (groups, N))
            layer.want_shape("qzeros", (groups, N // 8))
        else:
            width = _padded_words(groups, group)
            layer.want_shape("scales", (N, width * 8))
            layer.want_shape("qzeros", (N, width))
        return N, K

    def read(self, layer: PackedLayer) -> QuantizedArray:
        _, K = self.shape(layer)
        group = self._group(K)
        codes = unpack_words(layer.raw("qweight", "I32", "U32"), 4)
        zeros = unpack_words(layer.raw("qzeros", "I32", "U32"), 4)
        scales = layer.scales("scales")
        if self.version == "gemm":  # all are [inputs or groups, outputs]
            codes, zeros, scales = _in_order(codes).T, _in_order(zeros).T, scales.T
        zeros, scales = zeros[:, : K // group], scales[:, : K // group]
        return grouped_array(layer, codes, 4, scales, zeros, np.arange(K) // group)

    def packed_shape(self, layer: PackedLayer) -> QuantizedArray:
        N, K = self.shape(layer)
        return grouped_shape("int4", (N, K), self._group(K))

    def _group(self, K: int) -> int:
        return K if self.group_size == -1 else self.group_size


def _in_order(codes: np.ndarray) -> np.ndarray:
    """Codes [R, N] of words of eight outputs, the outputs in order."""
    return codes.reshape(len(codes), -1, 8)[:, :, _GEMM_ORDER].reshape(codes.shape)


def _padded_words(groups: int, group: int) -> int:
    """Words of zero points in a row of version "gemv": whole reads of its kernel."""
    step = {64: 2, 32: 4}.get(group, 1)
    return -(-groups // (8 * step)) * step
