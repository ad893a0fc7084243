"""The packed product on Hopper GPUs: what XLA does around the kernel (mosaic_kernel.py).

Activations are rounded to bfloat16 (for 8-bit floats to float16, each row scaled by a power of two
so that it fits), padded to whole tiles, and put in the order in which the matrix keeps its inputs.
The pieces of a sum that was cut along K are added one after the other: a result has the same bits
every time, and a row's do not depend on what the other rows are.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.gpu_layout import (
    Spec,
    expand_gpu,
    gpu_spec,
    padded_shape,
    part_shapes,
)
from pallas_kernels.quantized_matmul.mosaic_kernel import packed_product
from pallas_kernels.quantized_matmul.mosaic_plan import Plan, operands
from pallas_kernels.quantized_matmul.tiles import Tiles, choose_splits, choose_tiles


def matmul_gpu(
    x: jax.Array,
    w: QuantizedArray,
    *,
    out_dtype: Any = jnp.float32,
    tiles: Tiles | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [..., K] times w [N, K] in the layout "gpu" or "gpu_w8a8": [..., N] of out_dtype.

    x of any float type, its columns as the caller has them. With "gpu_w8a8" rows of x are rounded
    to 8 bits, each with a scale of its own. tiles, splits: instead of those of tiles.py.
    interpret: on a CPU, slowly, with checks for races.

    Raises ValueError for a w whose parts are not what gpu_layout.py says.
    """
    spec = checked_spec(w)
    N, K = w.shape
    flat = in_kept_order(x, w).reshape(math.prod(x.shape[:-1]), K)
    M = flat.shape[0]
    if not spec.group:
        contract = (((1,), (1,)), ((), ()))
        values = w.parts["values"].astype(jnp.bfloat16)
        y = lax.dot_general(
            flat.astype(jnp.bfloat16), values, contract, preferred_element_type=jnp.float32
        )
        return y.astype(out_dtype).reshape(*x.shape[:-1], N)
    if M == 0:
        return jnp.zeros((*x.shape[:-1], N), out_dtype)
    plan = make_plan(w, M, out_dtype, tiles=tiles, splits=splits)
    parts = {name: part[None] for name, part in w.parts.items() if name != "perm"}
    y = run_plan(plan, flat, parts, None, interpret=interpret)[:M, :N]
    return y.astype(out_dtype).reshape(*x.shape[:-1], N)


def take_rows_gpu(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Rows [T] int32 of w, expanded: float32 [T, K], columns as they are kept. Ids are clipped."""
    checked_spec(w)
    return expand_gpu(w, rows)


def in_kept_order(x: jax.Array, w: QuantizedArray) -> jax.Array:
    perm = w.parts.get("perm")
    return x if perm is None else jnp.take(x, perm, axis=-1, mode="clip")


def checked_spec(w: QuantizedArray, lead: tuple[int, ...] = ()) -> Spec:
    """The spec of w, whose parts all have the axes `lead` before their own (experts).

    Raises ValueError for parts of other shapes or types.
    """
    for name, (dtype, shape) in part_shapes(w).items():
        part = w.parts.get(name)
        got = None if part is None else (str(part.dtype), tuple(part.shape))
        if got != (dtype, (*lead, *shape)):
            raise ValueError(
                f"{name} of a {w.format_name} matrix {w.shape} in the layout {w.layout!r} is "
                f"{got}, want {(dtype, (*lead, *shape))}"
            )
    return gpu_spec(w)


def make_plan(
    w: QuantizedArray,
    M: int,
    out_dtype: Any,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
    grouped: bool = False,
) -> Plan:
    """How w is multiplied with M rows; with `grouped`, M is a multiple of tiles.block_m."""
    spec = gpu_spec(w)
    N, K = padded_shape(w, spec)
    tiles = tiles or choose_tiles(M, N, spec.high_bits)
    if K % tiles.block_k or N % tiles.block_n:
        block_k = tiles.block_k if K % tiles.block_k == 0 else 128
        block_n = tiles.block_n if N % tiles.block_n == 0 else 128
        tiles = replace(tiles, block_k=block_k, block_n=block_n)
    padded_m = -(-M // tiles.block_m) * tiles.block_m
    blocks = (N // tiles.block_n) * (padded_m // tiles.block_m)
    steps = K // tiles.block_k
    splits = splits or choose_splits(steps, blocks)
    eight_bit = w.layout == "gpu_w8a8"
    return Plan(
        spec, padded_m, N, K, tiles, -(-steps // -(-steps // splits)),
        _where_scales_go(spec, K, tiles, eight_bit),
        out_dtype if splits == 1 else jnp.float32, eight_bit, grouped,
    )  # fmt: skip


def _where_scales_go(spec: Spec, K: int, tiles: Tiles, eight_bit: bool) -> str:
    """See mosaic_kernel.py."""
    if spec.group == K and not (eight_bit and spec.format_name == "fp8"):
        return "end"
    if eight_bit or tiles.block_m <= 16:
        return "sums"  # tensor cores add 8-bit floats with few bits: not for more than a step
    registers = tiles.block_m * tiles.block_n // 128  # of sums, to a thread, and as many again
    return "sums" if spec.group >= 128 and registers <= 64 else "weights"


def run_plan(
    plan: Plan,
    x: jax.Array,
    parts: dict[str, jax.Array],
    table: jax.Array | None,
    *,
    interpret: bool,
) -> jax.Array:
    """[M, N] (padded) of x [rows, K] and w's parts, which have an axis of experts first.

    table: see packed_product. One function for all layers, so that equal products of a program are
    traced and compiled once; interpreted, it is traced where it is called, for what watches that.
    """
    run = _run if interpret else _run_once_traced
    return run(plan, x, parts, table, interpret)


def _run(
    plan: Plan, x: jax.Array, parts: dict[str, jax.Array], table: jax.Array | None, interpret: bool
) -> jax.Array:
    x = jnp.pad(x, ((0, plan.M - x.shape[0]), (0, plan.K - x.shape[1])))
    rounded, row_scale = _rounded(plan, x)
    arrays = {"x": rounded} | {name: _as_kernel_reads(plan, name, parts[name]) for name in parts}
    if plan.needs_sums:
        groups = rounded.reshape(plan.M, -1, plan.spec.group)
        arrays["x_sums"] = jnp.sum(groups.astype(jnp.float32), axis=2).T
    inputs = [arrays[operand.name] for operand in operands(plan)]
    if table is not None:
        inputs.insert(0, table)
    pieces = packed_product(plan, interpret=interpret)(*inputs)
    y = pieces[0]
    for piece in range(1, plan.splits):  # one by one: their order is part of the result
        y = y + pieces[piece]
    return y if row_scale is None else y * row_scale


_run_once_traced = jax.jit(_run, static_argnums=(0, 4))


def _rounded(plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """x in the type that the kernel multiplies, and what its rows are to be multiplied with."""
    if plan.x_dtype == jnp.bfloat16:
        return x.astype(jnp.bfloat16), None
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    if plan.x_dtype == jnp.float16:
        # A power of two, which rounds nothing: the largest number comes to lie from 2^14 to 2^15.
        bits = lax.bitcast_convert_type(jnp.maximum(largest, 1e-30), jnp.int32)
        exponent = (bits >> 23) - 127 - 14
        up = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
        down = lax.bitcast_convert_type((127 + exponent) << 23, jnp.float32)
        return (x * up).astype(jnp.float16), down
    limit = 127.0 if plan.x_dtype == jnp.int8 else 448.0
    # Products, each rounded once: compilers make products of quotients, and numbers half way
    # between two of 8 bits then fall to either side.
    inverse = jnp.where(largest > 1e-30, limit / largest, 1.0)
    scale = largest * np.float32(1 / limit)
    scaled = jnp.clip(x * inverse, -limit, limit)
    if plan.x_dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(plan.x_dtype), scale


def _as_kernel_reads(plan: Plan, name: str, part: jax.Array) -> jax.Array:
    """The same bytes under the type that the kernel reads: nothing is moved."""
    if name != "codes":
        return part
    if plan.spec.bits == 4:
        nibbles = lax.bitcast_convert_type(part, jnp.int4)  # [E, N, K / 2, 2]
        return nibbles.reshape(*part.shape[:2], plan.K)
    if plan.spec.format_name == "fp8":
        return lax.bitcast_convert_type(part, jnp.float8_e4m3fn)
    return part
