"""Codes of grouped formats: out of the 32-bit words of checkpoints, into the bytes we keep.

Every format is brought to unsigned codes and zero points of its bits first; what they mean,
(code - zero) * scale, does not change when both move by the same number.
"""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxserve.loading.aligned_array import aligned_empty
from jaxserve.loading.packed_layer import PackedLayer
from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.formats import FORMATS

SMALLEST_GROUP = 8  # inputs that must share a scale, or scales outgrow codes
_FP8_NAN = 0x7F  # of e4m3, with either sign
_AT_ONCE = 1 << 20  # weights: bounds what is needed beside a matrix


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 2, 3, 4 or 8 bits from 32-bit words [R, W], low bits first: uint8 [R, 32 W / bits].

    Codes of 3 bits run on from one word into the next, so W is a multiple of 3.
    """
    R, W = words.shape
    stream = np.ascontiguousarray(words, "<i4").view(np.uint8)  # [R, 4 W]
    if bits == 8:
        return stream
    if bits in (2, 4):
        codes = np.empty((R, 4 * W, 8 // bits), np.uint8)
        for place in range(8 // bits):
            codes[:, :, place] = (stream >> (place * bits)) & (2**bits - 1)
        return codes.reshape(R, -1)
    # 8 codes of 3 bits are 3 bytes.
    triples = stream.reshape(R, -1, 3).astype(np.uint32)
    joined = triples[:, :, 0] | triples[:, :, 1] << 8 | triples[:, :, 2] << 16
    codes = np.empty((R, joined.shape[1], 8), np.uint8)
    for place in range(8):
        codes[:, :, place] = (joined >> (3 * place)) & 7
    return codes.reshape(R, -1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 [N, K] as bytes [N, K / 2]: the first of two in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [N, K / 2] as codes 0..15 uint8 [N, K]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def grouped_array(
    layer: PackedLayer,
    codes: np.ndarray,
    bits: int,
    scales: np.ndarray,
    zeros: np.ndarray,
    group_of_input: np.ndarray,
) -> QuantizedArray:
    """The matrix of unsigned codes uint8 [N, K] of at most 4 bits, or of 8, by its `bits`.

    scales float32 and zeros (integers, in the range of the codes) [N, G]. group_of_input [K]:
    which of the G each input belongs to, in any order: unless they ascend, columns are sorted by
    group and the order is kept as `perm`. Raises ModelLoadError for groups that are not there or
    too uneven.
    """
    N, K = codes.shape
    perm, index, group = columns_by_group(layer, group_of_input, scales.shape[1])
    if perm is not None:
        codes = np.take(codes, perm, axis=1)
    scales, zeros = scales[:, index], zeros[:, index]
    parts = {"scales": np.ascontiguousarray(scales)}
    if bits == 8:
        parts["codes"] = (codes ^ 0x80).view(np.int8)  # minus 128, as the zero points
        if not (zeros == 128).all():
            parts["zeros"] = (zeros.astype(np.int16) - 128).astype(np.int8)
    else:
        parts["codes"] = pack_nibbles(codes)
        parts["zeros"] = np.ascontiguousarray(zeros, np.uint8)
    if perm is not None:
        parts["perm"] = perm.astype(np.int32)
    return QuantizedArray(parts, "int8" if bits == 8 else "int4", (N, K), group)


def grouped_shape(
    format_name: str,
    shape: tuple[int, int],
    group: int,
    *,
    has_zeros: bool = True,
    perm: np.ndarray | None = None,
) -> QuantizedArray:
    """A matrix of a grouped format, as shapes. perm: its order of columns."""
    N, K = shape
    codes = np.dtype(np.int8 if format_name == "int8" else np.uint8)
    per_group = (N, K // group)
    parts: dict[str, Any] = {
        "codes": jax.ShapeDtypeStruct((N, K * FORMATS[format_name].bits // 8), codes),
        "scales": jax.ShapeDtypeStruct(per_group, np.dtype(np.float32)),
    }
    if has_zeros:
        parts["zeros"] = jax.ShapeDtypeStruct(per_group, codes)
    if perm is not None:
        parts["perm"] = perm.astype(np.int32)
    return QuantizedArray(parts, format_name, shape, group)


def columns_by_group(
    layer: PackedLayer, group_of_input: np.ndarray, num_groups: int
) -> tuple[np.ndarray | None, np.ndarray, int]:
    """(order of the columns or None, index of scale per kept group, inputs of a kept group).

    Kept groups are all of one size: where some group is shorter (the last one, if K is no
    multiple), all are cut into the largest size that fits, and scales are repeated.
    """
    if group_of_input.min() < 0 or group_of_input.max() >= num_groups:
        raise layer.refusal(
            f"g_idx names groups {group_of_input.min()} to {group_of_input.max()}, "
            f"but there are {num_groups}; the file is damaged"
        )
    order = np.argsort(group_of_input, kind="stable")
    in_order = bool((order[1:] > order[:-1]).all())
    counts = np.bincount(group_of_input)
    group = int(np.gcd.reduce(counts))
    if group < min(SMALLEST_GROUP, len(group_of_input)):
        raise layer.refusal(
            f"groups of inputs are of uneven sizes {counts.min()} to {counts.max()}, which is not "
            f"supported; want sizes with a common divisor of {SMALLEST_GROUP} or more"
        )
    return None if in_order else order, group_of_input[order][::group], group


def scaled_fp8(
    layer: PackedLayer, codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]
) -> QuantizedArray:
    """The matrix of e4m3 bits uint8 [N, K] with a scale per block of [rows, inputs].

    scales float32 [ceil(N / rows), ceil(K / inputs)]. Raises ModelLoadError where a code is NaN.
    """
    N, K = codes.shape
    rows, inputs = block
    for start in range(0, N, max(1, _AT_ONCE // K)):
        piece = codes[start : start + max(1, _AT_ONCE // K)]
        if ((piece & 0x7F) == _FP8_NAN).any():
            raise layer.refusal("weight holds NaN; the file is damaged")
    _, index, group = columns_by_group(layer, np.arange(K) // inputs, scales.shape[1])
    wide = np.ascontiguousarray(np.repeat(scales, rows, axis=0)[:N, index])
    return QuantizedArray({"codes": codes, "scales": wide}, "fp8", (N, K), group)


def fp8_shape(layer: PackedLayer, shape: tuple[int, int], inputs: int) -> QuantizedArray:
    """What `scaled_fp8` gives for blocks of that many inputs, as shapes."""
    K = shape[1]
    _, _, group = columns_by_group(layer, np.arange(K) // inputs, -(-K // inputs))
    return grouped_shape("fp8", shape, group, has_zeros=False)


def expand(array: QuantizedArray) -> np.ndarray:
    """The float32 matrix [N, K] that a grouped array in the layout "rows" stands for."""
    N, K = array.shape
    values = aligned_empty((N, K), np.float32)
    rows = max(1, _AT_ONCE // K)
    perm = array.parts.get("perm")
    for start in range(0, N, rows):
        piece = slice(start, start + rows)
        steps = _steps(array, piece)
        steps *= np.asarray(array.parts["scales"])[piece, :, None]
        kept = steps.reshape(-1, K)
        if perm is None:
            values[piece] = kept
        else:
            values[piece, perm] = kept
    return values


def _steps(array: QuantizedArray, piece: slice) -> np.ndarray:
    """Codes minus zero points of some rows, as float32 [rows, groups, inputs of a group]."""
    codes = np.asarray(array.parts["codes"])[piece]
    if array.format_name == "fp8":
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    elif array.format_name == "int4":
        codes = unpack_nibbles(codes)
    steps = codes.astype(np.float32).reshape(len(codes), -1, array.group)
    if "zeros" in array.parts:
        steps -= np.asarray(array.parts["zeros"])[piece, :, None].astype(np.float32)
    return steps
