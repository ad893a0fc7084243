"""Checkpoints of 8-bit floats (e4m3): DeepSeek's with a scale per block, others' with one each.

A weight is stored number times scale; DeepSeek calls the scale weight_scale_inv, and it is one
per block of 128 rows and 128 inputs (arXiv:2412.19437, 3.3.2). What the file says about rounding
activations is not followed: they stay float.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.loading.packed_codes import fp8_shape, scaled_fp8
from jaxserve.loading.packed_layer import PackedLayer, setting
from pallas_kernels.quantized_matmul.array import QuantizedArray

logger = logging.getLogger(__name__)

MAX_BLOCK = 1 << 20


def layer_format(settings: Mapping[str, Any]) -> "FP8":
    """The format of config.json's settings. Raises ModelLoadError for what is not supported."""
    setting(settings, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    block = settings.get("weight_block_size")
    logger.info("the checkpoint asks for 8-bit activations; they stay float, which is more exact")
    return FP8(None if block is None else block_size(block, "weight_block_size"))


def block_size(block: Any, key: str) -> tuple[int, int]:
    """[rows, inputs] of a block that shares a scale."""
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(
        type(size) is not int or not 1 <= size <= MAX_BLOCK for size in sizes
    ):
        raise ModelLoadError(
            f"quantization: {key} is {str(block)[:40]!r}; want two whole numbers, [128, 128] say"
        )
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class FP8:
    """A LayerFormat. block: rows and inputs that share a scale; None: whatever the scales fit."""

    block: tuple[int, int] | None
    title = "8-bit floats"
    markers = ("weight",)
    parts = ("weight", "weight_scale_inv", "weight_scale")
    ignored = (
        "input_scale",
        "input_scale_ub",
        "activation_scale",
        "kv_scale",
        "k_scale",
        "v_scale",
        "q_scale",
    )

    def is_packed(self, layer: PackedLayer) -> bool:
        return layer.dtype("weight").startswith("F8_")

    def shape(self, layer: PackedLayer) -> tuple[int, int]:
        N, K = layer.shape("weight")
        self._layout(layer, N, K)
        return N, K

    def read(self, layer: PackedLayer) -> QuantizedArray:
        N, K = layer.shape("weight")
        part, block = self._layout(layer, N, K)
        scales = layer.scales(part)
        grid = scales.reshape(-(-N // block[0]), -(-K // block[1]))
        return scaled_fp8(layer, layer.raw("weight", "F8_E4M3"), grid, block)

    def packed_shape(self, layer: PackedLayer) -> QuantizedArray:
        N, K = layer.shape("weight")
        return fp8_shape(layer, (N, K), self._layout(layer, N, K)[1][1])

    def _layout(self, layer: PackedLayer, N: int, K: int) -> tuple[str, tuple[int, int]]:
        """The part with the scales, whose shape is right, and the block that shares one."""
        part = "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
        if not layer.has(part):
            raise layer.refusal("the weight is in 8-bit floats, but weight_scale is missing")
        return part, scale_block(layer, part, (N, K), self.block)


def scale_block(
    layer: PackedLayer, part: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    """What shares a scale: the matrix, an output row, or a block, by the shape of the scales.

    Raises ModelLoadError for a shape that is none of these.
    """
    N, K = shape
    got = layer.folder.shape(f"{layer.name}.{part}")
    if block is not None and got == (-(-N // block[0]), -(-K // block[1])):
        return block
    if block is None and got in ((), (1,), (1, 1)):
        return N, K
    if block is None and got in ((N,), (N, 1)):
        return 1, K
    wanted = "one, or one per output row" if block is None else f"one per block of {list(block)}"
    raise layer.refusal(f"{part} has the shape {list(got)}; for {[N, K]} want {wanted}")
