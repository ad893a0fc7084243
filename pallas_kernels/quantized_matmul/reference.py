"""What packed weights mean, in plain jax.numpy: the definition every kernel is tested against.

Formats of blocks follow the `gguf` package operation by operation, so that the expansion outside
jit is the same float32 numbers bit for bit (inside jit XLA may contract a product and a sum into
one rounding). Spec of the MXFP4 numbers: OCP Microscaling Formats v1.0; of FP8: arXiv:2209.05433.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.array import QuantizedArray, StackedRows

# Twice the values of the codes 0..15 of FP4 (e2m1); block scales are halved to make up for it.
_MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(w: QuantizedArray | StackedRows) -> jax.Array:
    """The float32 matrix [N, K] that packed `w` stands for, columns in the order of the inputs.

    Raises ValueError for a layout other than "rows".
    """
    if isinstance(w, StackedRows):
        return jnp.concatenate([dequantize(piece) for piece in w.pieces])
    return in_input_order(w, _expand(w))


def in_input_order(w: QuantizedArray, kept: jax.Array) -> jax.Array:
    """Rows [T, K] of w in the column order it is kept in, with the columns put back."""
    perm = w.parts.get("perm")
    return kept if perm is None else jnp.zeros_like(kept).at[:, perm].set(kept)


def matmul_reference(x: jax.Array, w: QuantizedArray) -> jax.Array:
    """x [..., K], already in the column order `w` is kept in, times w [N, K]: float32 [..., N]."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x.astype(jnp.float32), _expand(w), contract, lax.Precision.HIGHEST, jnp.float32
    )


def take_rows_reference(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Rows [T] int32 of w [N, K], expanded: float32 [T, K], columns in the order of the inputs.

    Row ids are clipped to 0..N-1.
    """
    parts = {
        name: part if name == "perm" else jnp.take(part, rows, axis=0, mode="clip")
        for name, part in w.parts.items()
    }
    shape = (rows.shape[0], w.shape[1])
    return dequantize(QuantizedArray(parts, w.format_name, shape, w.group, w.layout))


def _expand(w: QuantizedArray) -> jax.Array:
    """float32 [N, K], columns in the order they are kept in."""
    if w.layout != "rows":
        raise ValueError(f"the reference expands the layout 'rows', got {w.layout!r}")
    form = w.format
    if form.kind == "dense":
        return w.parts["values"].astype(jnp.float32)
    if form.kind == "grouped":
        return _expand_grouped(w)
    N, K = w.shape
    blocks = jnp.reshape(w.parts["blocks"], (N, K // form.block_size, form.block_bytes))
    return _BLOCKS[form.name](blocks).reshape(N, K)


def _expand_grouped(w: QuantizedArray) -> jax.Array:
    N, K = w.shape
    codes = jnp.asarray(w.parts["codes"])
    grouped = (N, K // w.group, w.group)
    scales = jnp.asarray(w.parts["scales"])[:, :, None]
    if w.format_name == "fp8":
        numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        return (numbers.reshape(grouped) * scales).reshape(N, K)
    if w.format_name == "int4":
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
    steps = codes.reshape(grouped).astype(jnp.int32)
    if "zeros" in w.parts:
        steps = steps - jnp.asarray(w.parts["zeros"])[:, :, None].astype(jnp.int32)
    return (steps.astype(jnp.float32) * scales).reshape(N, K)


# Block types. Each takes blocks [N, B, block_bytes] uint8 and gives float32, N * K in any shape.


def _float16(two_bytes: jax.Array) -> jax.Array:
    """[..., 2 * n] uint8 -> float32 [..., n]."""
    pairs = two_bytes.reshape(*two_bytes.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def _low_then_high(codes: jax.Array) -> jax.Array:
    """[..., n] uint8 -> [..., 2 * n]: all low nibbles, then all high ones."""
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1)


def _fifth_bits(planes: jax.Array) -> jax.Array:
    """[..., 4] uint8 -> 16 or 0 [..., 32]: bit i of the little-endian word is of weight i."""
    bits = (planes[..., :, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return (bits << 4).reshape(*planes.shape[:-1], 32)


def _signed(codes: jax.Array, middle: int) -> jax.Array:
    return (codes.astype(jnp.int32) - middle).astype(jnp.float32)


def _q4_0(blocks: jax.Array) -> jax.Array:
    """d float16; 16 bytes: weight i in the low, i + 16 in the high nibble of byte i."""
    return _float16(blocks[..., :2]) * _signed(_low_then_high(blocks[..., 2:]), 8)


def _q4_1(blocks: jax.Array) -> jax.Array:
    """d, m float16; codes as in Q4_0."""
    codes = _low_then_high(blocks[..., 4:]).astype(jnp.float32)
    return _float16(blocks[..., :2]) * codes + _float16(blocks[..., 2:4])


def _q5_0(blocks: jax.Array) -> jax.Array:
    """d float16; fifth bits, 4 bytes; low bits as in Q4_0."""
    codes = _low_then_high(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _float16(blocks[..., :2]) * _signed(codes, 16)


def _q5_1(blocks: jax.Array) -> jax.Array:
    """d, m float16; fifth bits, 4 bytes; low bits as in Q4_0."""
    codes = _low_then_high(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _float16(blocks[..., :2]) * codes.astype(jnp.float32) + _float16(blocks[..., 2:4])


def _q8_0(blocks: jax.Array) -> jax.Array:
    """d float16; 32 signed bytes."""
    codes = lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
    return _float16(blocks[..., :2]) * codes.astype(jnp.float32)


def _mxfp4(blocks: jax.Array) -> jax.Array:
    """Exponent byte e; 16 bytes of FP4 codes as in Q4_0. Scale 2 ** (e - 127).

    The smallest scales are below float32's normal range, where a CPU may flush to zero: the
    scale is applied in two halves, so that only weights that are too small themselves are lost.
    """
    exponent = blocks[..., :1].astype(jnp.int32) - 128
    first = exponent // 2
    second = exponent - first
    doubled = jnp.asarray(_MXFP4_DOUBLED, jnp.float32)[_low_then_high(blocks[..., 1:])]
    return doubled * _power_of_two(first) * _power_of_two(second)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2.0 ** exponent, exactly, for int32 exponents of normal float32 numbers."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _k_scales(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 8 six-bit scales and 8 minima of Q4_K and Q5_K: 12 bytes -> float32 [..., 8] each.

    Bytes 0..3 hold scales 0..3 and bytes 4..7 minima 0..3 in their low 6 bits; byte 8 + i holds
    the low 4 bits of scale 4 + i (low nibble) and of minimum 4 + i (high nibble), whose high 2
    bits are the top bits of byte i and byte 4 + i.
    """
    scales, minima, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    high_scales = (rest & 15) | ((scales >> 2) & 0x30)
    high_minima = (rest >> 4) | ((minima >> 2) & 0x30)
    return (
        jnp.concatenate([scales & 63, high_scales], axis=-1).astype(jnp.float32),
        jnp.concatenate([minima & 63, high_minima], axis=-1).astype(jnp.float32),
    )


def _k_affine(blocks: jax.Array, codes: jax.Array) -> jax.Array:
    """(d * scale) * code - (dmin * minimum) for codes [..., 8, 32]; d, dmin start a block."""
    scales, minima = _k_scales(blocks[..., 4:16])
    scales = _float16(blocks[..., 0:2]) * scales
    minima = _float16(blocks[..., 2:4]) * minima
    return scales[..., None] * codes.astype(jnp.float32) - minima[..., None]


def _k_nibbles(codes: jax.Array) -> jax.Array:
    """128 bytes -> [..., 8, 32]: 32 bytes hold group 2j in low and 2j + 1 in high nibbles."""
    quarters = codes.reshape(*codes.shape[:-1], 4, 32)
    return jnp.stack([quarters & 15, quarters >> 4], axis=-2).reshape(*codes.shape[:-1], 8, 32)


def _q4_k(blocks: jax.Array) -> jax.Array:
    """d, dmin float16; 12 bytes of scales; 128 bytes of nibbles."""
    return _k_affine(blocks, _k_nibbles(blocks[..., 16:144]))


def _q5_k(blocks: jax.Array) -> jax.Array:
    """d, dmin float16; 12 bytes of scales; 32 bytes, bit g of byte i: weight i of group g; nibbles
    as in Q4_K."""
    planes = blocks[..., None, 16:48] >> jnp.arange(8, dtype=jnp.uint8)[:, None]
    codes = _k_nibbles(blocks[..., 48:176]) | ((planes & 1) << 4)
    return _k_affine(blocks, codes)


def _q6_k(blocks: jax.Array) -> jax.Array:
    """128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, d float16.

    Half h (128 weights) has nibble bytes 64 h ... and pair bytes 32 h ...; its weights 0..63 are
    the low nibbles, 64..127 the high ones; weights 32 p ... take bits 2 p of the 32 pair bytes.
    """
    lead = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*lead, 2, 64)
    low = jnp.stack([low & 15, low >> 4], axis=-2).reshape(*lead, 2, 4, 32)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    codes = _signed(low | (high << 4), 32).reshape(*lead, 16, 16)
    scales = lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    scales = _float16(blocks[..., 208:210]) * scales
    return scales[..., None] * codes


_BLOCKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _mxfp4,
}
