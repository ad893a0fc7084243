"""Packed codes in a warpgroup's registers, as the numbers that the tensor cores multiply.

A warpgroup holds 64 output rows of a block. Codes become small whole numbers, which bfloat16 holds
exactly (8-bit floats become float16, which holds them exactly too); what a group's numbers are
multiplied with and raised by comes beside them, in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.quantized_matmul.gpu_layout import Spec

# part, first column: the 64 rows' entries for that column's group, float32
Vector = Callable[[str, int], jax.Array]
# first column, width: [64, width] numbers
Numbers = Callable[[int, int], jax.Array]


def by_row(vector: jax.Array, like: tuple[int, int]) -> jax.Array:
    """[64] -> [64, n]."""
    return lax.broadcast_in_dim(vector, like, [0])


def shift(spec: Spec) -> int:
    """What `numbers` subtracts from a code as the file has it, zero points aside."""
    if not spec.affine:
        return spec.middle
    return 16 if spec.high_bits else 8  # any would do; these cost nothing


def numbers(spec: Spec, codes: Any, high: Any, vector: Vector) -> Numbers:
    """Codes of 64 rows of a block in shared memory, less `shift` and zero points.

    codes [64, BK] of int4, int8 or e4m3; high [64, BK * high_bits / 8] int8 or None, both refs.
    """
    layout = mgpu.Layout.WGMMA_UPCAST_4X if spec.bits == 4 else mgpu.Layout.WGMMA_UPCAST_2X
    low = mgpu.layout_cast(mgpu.load(codes, layout=layout), mgpu.Layout.WGMMA)
    fields = _fields(spec, high) if spec.high_bits else []

    def part(column: int, width: int) -> jax.Array:
        some = low[:, column : column + width]
        if spec.format_name == "fp8":
            return some.astype(jnp.float16)
        values = some.astype(jnp.bfloat16)
        if spec.high_bits:
            return _with_high_bits(spec, values, fields, column)
        base = 8 if spec.bits == 4 else 0  # subtracted already
        if "zeros" in spec.parts:
            zeros = base - vector("zeros", column)
            return values + by_row(zeros.astype(jnp.bfloat16), values.shape)
        offset = base - shift(spec)
        return values + jnp.bfloat16(offset) if offset else values

    return part


def _fields(spec: Spec, high: Any) -> list[jax.Array]:
    """Each field of the planes alone, where it stands in its byte, as int8 [64, bytes]."""
    planes = mgpu.load(high, layout=mgpu.Layout.WGMMA_UPCAST_2X)
    masks = [(2**spec.high_bits - 1) << position for position in range(0, 8, spec.high_bits)]
    signed = [mask - 256 if mask > 127 else mask for mask in masks]
    return [mgpu.layout_cast(planes & jnp.int8(mask), mgpu.Layout.WGMMA) for mask in signed]


def _with_high_bits(spec: Spec, low: jax.Array, fields: list[jax.Array], column: int) -> jax.Array:
    """low + 8 + 16 * high bits - shift, exactly, for the columns of one field of one chunk."""
    chunk = 32 * len(fields)
    number, offset = column % chunk // 32, 8 - shift(spec)
    first = column // chunk * 32 + column % 32
    high = fields[number][:, first : first + low.shape[1]].astype(jnp.bfloat16)
    if number == len(fields) - 1:
        offset += 8 * 2**spec.high_bits  # its highest bit is flipped, and counts as a sign
    return low + (high * jnp.bfloat16(16 / 2 ** (spec.high_bits * number)) + jnp.bfloat16(offset))


def factors(spec: Spec, vector: Vector, column: int) -> tuple[jax.Array, jax.Array | None]:
    """(scale, bias), float32 [64] each: a weight is scale * its number of `numbers` + bias."""
    if "d" not in spec.parts:
        return vector("scales", column), None
    scale = vector("d", column)
    if "scales" in spec.parts:
        scale = scale * vector("scales", column)
    if not spec.affine:
        return scale, None
    if "m" in spec.parts:
        return scale, vector("m", column) + shift(spec) * scale
    return scale, shift(spec) * scale - vector("dmin", column) * vector("mins", column)
