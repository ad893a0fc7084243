"""The layout "gpu": packed weights as the Hopper kernels read them, and what they stand for.

Repacking loses nothing and adds little: GGUF's blocks come apart into arrays that the bulk copy
engine can read (their strides must be multiples of 16 bytes, which an 18-byte block is not). All
formats are brought to three kinds of arrays:

codes   [N, K] of 4 or 8 bits, along K. Four-bit codes are kept as code - 8, a signed number, which
        the GPU widens in fewer instructions than an unsigned one.
high    the bits of 5- and 6-bit codes above the low four: byte i of a chunk of 32 bytes holds
        inputs i, 32 + i, 64 + i, ... of the chunk, the first in its lowest bits; the topmost field
        has its highest bit flipped, so that the byte's sign bit is that of a signed number.
scales  and the like: [K / span, N], `span` inputs to an entry, outputs side by side.

N is padded to a multiple of 128 and K to one of 128 (256 for 5-bit formats) with weights of 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.formats import FORMATS

LAYOUTS = ("gpu", "gpu_w8a8")
ROWS = 128  # N is padded to a multiple of it: the rows of a tile
_COLUMNS = 128
_ROWS_AT_ONCE = 1024  # of a matrix, while it is repacked
_NO_LAYOUT = {"mxfp4": "its numbers are no whole multiples of a scale"}


@dataclass(frozen=True)
class Part:
    """One array. span: inputs to an entry. across: [K / span, N] instead of [N, K / span]."""

    dtype: str
    span: int
    across: bool = True


@dataclass(frozen=True)
class Spec:
    """How a format is kept. parts: name -> Part. group: inputs that share a scale (0: dense).

    bits: of the codes' low part (4 or 8). high_bits: of an input in "high" (0: there is none).
    middle: what is subtracted from a code as the file has it: w = scale * (code - middle) + bias.
    affine: there is a bias, a minimum per group.
    """

    format_name: str
    parts: Mapping[str, Part] = field(hash=False)
    group: int
    bits: int
    high_bits: int = 0
    middle: int = 0
    affine: bool = False

    @property
    def columns(self) -> int:
        """K is padded to a multiple of it."""
        return 256 if self.high_bits == 1 else _COLUMNS


_NIBBLES, _BYTES = Part("uint8", 2, across=False), Part("int8", 1, across=False)
_PAIRS, _BITS = Part("int8", 4, across=False), Part("int8", 8, across=False)
_HALF32, _HALF256 = Part("float16", 32), Part("float16", 256)
_K_PARTS = {
    "codes": _NIBBLES, "d": _HALF256, "dmin": _HALF256, "scales": Part("uint8", 32),
    "mins": Part("uint8", 32),
}  # fmt: skip
_BLOCKS = {
    spec.format_name: spec
    for spec in (
        Spec("q4_0", {"codes": _NIBBLES, "d": _HALF32}, 32, 4, middle=8),
        Spec("q4_1", {"codes": _NIBBLES, "d": _HALF32, "m": _HALF32}, 32, 4, affine=True),
        Spec("q5_0", {"codes": _NIBBLES, "high": _BITS, "d": _HALF32}, 32, 4, 1, 16),
        Spec(
            "q5_1", {"codes": _NIBBLES, "high": _BITS, "d": _HALF32, "m": _HALF32}, 32, 4, 1,
            affine=True,
        ),
        Spec("q8_0", {"codes": _BYTES, "d": _HALF32}, 32, 8),
        Spec("q4_k", _K_PARTS, 32, 4, affine=True),
        Spec("q5_k", _K_PARTS | {"high": _BITS}, 32, 4, 1, affine=True),
        Spec(
            "q6_k",
            {"codes": _NIBBLES, "high": _PAIRS, "d": _HALF256, "scales": Part("int8", 16)},
            16, 4, 2, 32,
        ),
    )
}  # fmt: skip


def gpu_spec(w: QuantizedArray) -> Spec:
    """How `w`, in any layout, is kept in the layout "gpu".

    Raises ValueError, saying got and want, for a format or group that it does not have.
    """
    name, K = w.format_name, w.shape[1]
    form = FORMATS[name]
    if form.kind == "dense":
        dtype = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[name]
        return Spec(name, {"values": Part(dtype, 1, across=False)}, 0, form.bits)
    if form.kind == "blocks":
        if name not in _BLOCKS:
            raise ValueError(f"there are no GPU kernels for {name}: {_NO_LAYOUT[name]}")
        return _BLOCKS[name]
    group = w.group
    if group != K and (group < 32 or (_COLUMNS % group and group % _COLUMNS)):
        raise ValueError(
            f"the GPU kernels have no {name} with groups of {group} of {K} inputs: want 32, 64, a "
            f"multiple of {_COLUMNS}, or {K}"
        )
    span = padded_columns(K, _COLUMNS) if group == K else group
    codes = {"int4": _NIBBLES, "int8": _BYTES, "fp8": Part("uint8", 1, across=False)}[name]
    parts = {"codes": codes, "scales": Part("float32", span)}
    if "zeros" in w.parts:
        parts["zeros"] = Part(codes.dtype, span)
    return Spec(name, parts, span, form.bits)


def padded_columns(K: int, columns: int) -> int:
    return -(-K // columns) * columns


def padded_shape(w: QuantizedArray, spec: Spec) -> tuple[int, int]:
    """(N, K) as they are kept; dense matrices are not padded."""
    if not spec.group:
        return w.shape
    N, K = w.shape
    return -(-N // ROWS) * ROWS, padded_columns(K, spec.columns)


def part_shapes(w: QuantizedArray) -> dict[str, tuple[str, tuple[int, int]]]:
    """Name -> type and shape of every part of w in the layout "gpu". Raises as `gpu_spec` does."""
    spec = gpu_spec(w)
    N, K = padded_shape(w, spec)
    shapes = {}
    for name, part in spec.parts.items():
        entries = K // part.span
        shapes[name] = part.dtype, (entries, N) if part.across else (N, entries)
    return shapes


def gpu_layout(w: QuantizedArray, layout: str) -> str:
    """`layout`, or "gpu" for formats that have no product with 8-bit activations."""
    eight = w.format_name in ("int8", "fp8") and "zeros" not in w.parts
    whole = w.group == w.shape[1] or w.group % _COLUMNS == 0
    return layout if eight and whole else "gpu"


def pack_gpu(w: QuantizedArray, layout: str) -> QuantizedArray:
    """w in the layout "rows" (already checked) in `layout`, in host memory.

    Raises ValueError as `gpu_spec` does.
    """
    spec, (N, _) = gpu_spec(w), w.shape
    kept = {k: v for k, v in w.parts.items() if k == "perm"}
    if not spec.group:
        return QuantizedArray({**w.parts}, w.format_name, w.shape, w.group, "gpu")
    for name, (dtype, shape) in part_shapes(w).items():
        kept[name] = np.zeros(shape, dtype)
    rows = {name: np.asarray(part) for name, part in w.parts.items() if name != "perm"}
    for first in range(0, N, _ROWS_AT_ONCE):
        some = {name: part[first : first + _ROWS_AT_ONCE] for name, part in rows.items()}
        for name, values in _columns(spec, some).items():
            size, entries = values.shape
            if spec.parts[name].across:
                kept[name][:entries, first : first + size] = values.T
            else:
                kept[name][first : first + size, :entries] = values
    return QuantizedArray(kept, w.format_name, w.shape, w.group, gpu_layout(w, layout))


def _columns(spec: Spec, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts of some rows, each [rows, entries along K]."""
    if "blocks" not in rows:
        parts = dict(rows)
        if spec.bits == 4:
            parts["codes"] = rows["codes"] ^ np.uint8(0x88)
        return parts
    form = FORMATS[spec.format_name]
    blocks = rows["blocks"].reshape(rows["blocks"].shape[0], -1, form.block_bytes)
    parts = _BLOCK_PARTS[spec.format_name](blocks)
    codes = parts.pop("whole", None)  # of more than four bits, [rows, blocks, weights]
    if codes is not None:
        parts["high"] = _planes(codes.reshape(codes.shape[0], -1) >> 4, spec.high_bits)
        parts["codes"] = codes & 15
    flat = {name: part.reshape(part.shape[0], -1) for name, part in parts.items()}
    if spec.bits == 4:
        flat["codes"] = (flat["codes"][:, ::2] | flat["codes"][:, 1::2] << 4) ^ np.uint8(0x88)
    return flat


def _planes(high: np.ndarray, high_bits: int) -> np.ndarray:
    """[rows, K] high bits -> int8 [rows, bytes]; see the module's docstring."""
    fields = 8 // high_bits
    R, K = high.shape
    whole = np.zeros((R, padded_columns(K, 32 * fields)), np.uint8)
    whole[:, :K] = high
    shifts = np.arange(0, 8, high_bits, dtype=np.uint8)[:, None]
    planes = np.bitwise_or.reduce(whole.reshape(R, -1, fields, 32) << shifts, axis=2)
    return (planes ^ np.uint8(0x80)).reshape(R, -1).view(np.int8)


# GGUF's block types, [rows, blocks, bytes] uint8 each; reference.py says what the bytes are.


def _half(two_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(two_bytes).view(np.float16)


def _low_then_high(codes: np.ndarray) -> np.ndarray:
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _fifth_bits(planes: np.ndarray) -> np.ndarray:
    return np.unpackbits(planes, axis=-1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> dict[str, np.ndarray]:
    return {"d": _half(b[..., :2]), "codes": _low_then_high(b[..., 2:])}


def _q4_1(b: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "d": _half(b[..., :2]), "m": _half(b[..., 2:4]), "codes": _low_then_high(b[..., 4:]),
    }  # fmt: skip


def _q5_0(b: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "d": _half(b[..., :2]), "whole": _low_then_high(b[..., 6:]) | _fifth_bits(b[..., 2:6]),
    }  # fmt: skip


def _q5_1(b: np.ndarray) -> dict[str, np.ndarray]:
    codes = _low_then_high(b[..., 8:]) | _fifth_bits(b[..., 4:8])
    return {"d": _half(b[..., :2]), "m": _half(b[..., 2:4]), "whole": codes}


def _q8_0(b: np.ndarray) -> dict[str, np.ndarray]:
    return {"d": _half(b[..., :2]), "codes": b[..., 2:].view(np.int8)}


def _k_scales(b: np.ndarray) -> dict[str, np.ndarray]:
    scales, minima, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    return {
        "d": _half(b[..., :2]),
        "dmin": _half(b[..., 2:4]),
        "scales": np.concatenate([scales & 63, (rest & 15) | ((scales >> 2) & 0x30)], axis=-1),
        "mins": np.concatenate([minima & 63, (rest >> 4) | ((minima >> 2) & 0x30)], axis=-1),
    }


def _k_nibbles(codes: np.ndarray) -> np.ndarray:
    quarters = codes.reshape(*codes.shape[:-1], 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=-2).reshape(*codes.shape[:-1], 256)


def _q4_k(b: np.ndarray) -> dict[str, np.ndarray]:
    return _k_scales(b) | {"codes": _k_nibbles(b[..., 16:144])}


def _q5_k(b: np.ndarray) -> dict[str, np.ndarray]:
    planes = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((planes & 1) << 4).reshape(*b.shape[:-1], 256)
    return _k_scales(b) | {"whole": _k_nibbles(b[..., 48:176]) | fifth}


def _q6_k(b: np.ndarray) -> dict[str, np.ndarray]:
    lead = b.shape[:-1]
    low = b[..., :128].reshape(*lead, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*lead, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (b[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    return {
        "whole": (low | (high << 4)).reshape(*lead, 256),
        "scales": b[..., 192:208].view(np.int8),
        "d": _half(b[..., 208:210]),
    }


_BLOCK_PARTS = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k,
    "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip


def expand_gpu(w: QuantizedArray, rows: jax.Array | None = None) -> jax.Array:
    """float32 [T, K] (all N without `rows`, int32 [T], clipped), columns as they are kept.

    Outside jit the same numbers, bit for bit, as `dequantize` gives before repacking.
    """
    spec, (N, K) = gpu_spec(w), w.shape
    parts: dict[str, Any] = {}
    for name, part in spec.parts.items():
        axis = int(part.across)
        taken = jnp.asarray(w.parts[name])
        if rows is None:
            taken = lax.slice_in_dim(taken, 0, N, axis=axis)
        else:
            taken = jnp.take(taken, jnp.clip(rows, 0, N - 1), axis=axis, mode="clip")
        parts[name] = taken.T if part.across else taken
    if not spec.group:
        return parts["values"].astype(jnp.float32)
    return _numbers(spec, parts)[:, :K]


def _numbers(spec: Spec, parts: Mapping[str, jax.Array]) -> jax.Array:
    """float32 [T, K padded] of parts that are all [T, entries along K]."""
    codes = _codes(spec, parts)
    T, K = codes.shape
    grouped = codes.reshape(T, K // spec.group, spec.group)
    f32 = {k: v.astype(jnp.float32) for k, v in parts.items() if k not in ("codes", "high")}
    if "zeros" in f32:
        grouped = grouped - f32["zeros"][:, :, None]
    if "d" not in f32:
        return (grouped * f32["scales"][:, :, None]).reshape(T, K)
    scale, bias = f32["d"], f32.get("m")
    if "scales" in f32:
        scale = jnp.repeat(scale, 256 // spec.group, axis=1) * f32["scales"]
    if "dmin" in f32:
        bias = -(jnp.repeat(f32["dmin"], 256 // spec.group, axis=1) * f32["mins"])
    numbers = scale[:, :, None] * (grouped - spec.middle)
    return (numbers if bias is None else numbers + bias[:, :, None]).reshape(T, K)


def _codes(spec: Spec, parts: Mapping[str, jax.Array]) -> jax.Array:
    """The codes as the file has them, float32 [T, K padded]."""
    codes = parts["codes"]
    if spec.format_name == "fp8":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if spec.bits == 8:
        return codes.astype(jnp.float32)
    T = codes.shape[0]
    codes = codes ^ jnp.uint8(0x88)
    low = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(T, -1)
    if not spec.high_bits:
        return low.astype(jnp.float32)
    planes = lax.bitcast_convert_type(parts["high"], jnp.uint8) ^ jnp.uint8(0x80)
    shifts = jnp.arange(0, 8, spec.high_bits, dtype=jnp.uint8)[:, None]
    high = (planes.reshape(T, -1, 1, 32) >> shifts) & jnp.uint8(2**spec.high_bits - 1)
    return (low | (high.reshape(T, -1) << 4)).astype(jnp.float32)
