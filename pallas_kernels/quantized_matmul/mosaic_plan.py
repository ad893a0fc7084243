"""What is fixed about a GPU product, and the arrays it reads piece by piece (mosaic_kernel.py)."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.gpu_layout import Spec
from pallas_kernels.quantized_matmul.tiles import Tiles

WARPGROUPS = 2


@dataclass(frozen=True)
class Plan:
    """Everything that is fixed about a product; the sizes are the padded ones.

    scales: "end", "sums" or "weights": where they go, see mosaic_kernel.py.
    eight_bit: the activations have 8 bits too, and both operands are read from shared memory.
    grouped: rows of activations come in tiles of block_m, each with an expert's number.
    """

    spec: Spec
    M: int
    N: int
    K: int
    tiles: Tiles
    splits: int
    scales: str
    out_dtype: Any
    eight_bit: bool = False
    grouped: bool = False

    @property
    def x_dtype(self) -> Any:
        fp8 = self.spec.format_name == "fp8"
        if self.eight_bit:
            return jnp.float8_e4m3fn if fp8 else jnp.int8
        return jnp.float16 if fp8 and self.scales != "weights" else jnp.bfloat16

    @property
    def code_dtype(self) -> Any:
        if self.spec.bits == 4:
            return jnp.int4
        return jnp.float8_e4m3fn if self.spec.format_name == "fp8" else jnp.int8

    @property
    def width(self) -> int:
        """Inputs multiplied at once: no more than share a scale."""
        return min(self.spec.group, self.tiles.block_k)

    @property
    def needs_sums(self) -> bool:
        """Of activations, group by group."""
        return self.spec.affine and self.scales == "sums"

    @property
    def stages(self) -> int:
        taken = operands(self)
        whole = sum(operand.nbytes for operand in taken if operand.whole)
        step = sum(operand.nbytes for operand in taken if not operand.whole)
        results = WARPGROUPS * self.tiles.block_m * 64 * jnp.dtype(self.out_dtype).itemsize
        return min(self.tiles.stages, (self.tiles.shared - results - whole) // step)


@dataclass(frozen=True)
class Operand:
    """An array of the product. shape: of one step's piece; `whole`: the piece serves all steps.

    axes: what each axis of the array counts: "expert", "m" (rows of activations), "n" (outputs),
    or inputs, by the number of them to an entry. tile: columns of a piece that is kept in swizzled
    tiles in shared memory, else 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | int, ...]
    whole: bool = False
    tile: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jax.dtypes.itemsize_bits(self.dtype) // 8


def operands(plan: Plan) -> tuple[Operand, ...]:
    """Those of `plan` in the order the kernel takes them, after the experts' table if any."""
    spec, tiles = plan.spec, plan.tiles
    bm, bn, bk = tiles.block_m, tiles.block_n, tiles.block_k
    x_tile = min(_line(plan.x_dtype), plan.width)
    found = [Operand("x", (bm, bk), plan.x_dtype, ("m", 1), tile=x_tile)]
    for name, part in spec.parts.items():
        dtype = plan.code_dtype if name == "codes" else jnp.dtype(part.dtype)
        if part.across:
            rows = max(1, bk // part.span)
            axes: tuple[str | int, ...] = ("expert", part.span, "n")
            found.append(Operand(name, (rows, bn), dtype, axes, whole=part.span == plan.K))
            continue
        span = 1 if name == "codes" else part.span
        tile = min(_line(dtype), bk // span)
        found.append(Operand(name, (bn, bk // span), dtype, ("expert", "n", span), tile=tile))
    if plan.needs_sums:
        found.append(Operand("x_sums", (bk // spec.group, bm), jnp.float32, (spec.group, "m")))
    return tuple(found)


def _line(dtype: Any) -> int:
    """Numbers in 128 bytes, the widest swizzle."""
    return 128 * 8 // int(jax.dtypes.itemsize_bits(dtype))
