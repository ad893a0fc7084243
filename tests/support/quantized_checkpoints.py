"""Packed linear layers as published checkpoints hold them, made number by number with Python ints.

Each maker draws codes, scales and zero points and gives (tensors by part, the matrix [N, K] they
stand for, computed element by element in float64). Slow and plain on purpose: it is what the
readers are tested against.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Layer = tuple[dict[str, np.ndarray], np.ndarray]
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # which output sits in each nibble, from the lowest


def words(codes: Sequence[int], bits: int) -> list[int]:
    """Codes one after the other, lowest bits first, cut into signed 32-bit words."""
    stream = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    cut = [stream >> (32 * index) & 0xFFFFFFFF for index in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in cut]


def packed_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] codes -> [R, C * bits / 32] words along the second axis."""
    return np.array([words(row, bits) for row in codes], np.int32)


def draw(
    rng: np.random.Generator,
    N: int,
    K: int,
    bits: int,
    group_of: Sequence[int],
    symmetric: bool,
    lowest_zero: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(codes [N, K], scales [N, G] on float16's grid, zeros [N, G], matrix [N, K])."""
    G = max(group_of) + 1
    codes = rng.integers(0, 2**bits, (N, K))
    scales = rng.uniform(0.01, 0.03, (N, G)).astype(np.float16)
    zeros = rng.integers(lowest_zero, 2**bits, (N, G))
    if symmetric:
        zeros[...] = 2 ** (bits - 1)
    matrix = np.empty((N, K))
    for n in range(N):
        for k in range(K):
            g = group_of[k]
            matrix[n, k] = (int(codes[n, k]) - int(zeros[n, g])) * float(scales[n, g])
    return codes, scales, zeros, matrix


def groups_of(rng: np.random.Generator, K: int, group: int, act_order: bool) -> list[int]:
    """The group of every input; -1: one for all."""
    groups = [0 if group == -1 else k // group for k in range(K)]
    return [groups[k] for k in rng.permutation(K)] if act_order else groups


def gptq_layer(
    rng: np.random.Generator,
    N: int,
    K: int,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    stored_minus: int = 1,
) -> Layer:
    """stored_minus: what writers take off the zero points; 1 in "gptq", 0 in "gptq_v2"."""
    group_of = groups_of(rng, K, group, act_order)
    codes, scales, zeros, matrix = draw(rng, N, K, bits, group_of, symmetric, lowest_zero=1)
    tensors = {
        "qweight": np.ascontiguousarray(packed_rows(codes, bits).T),
        "qzeros": packed_rows(zeros.T - stored_minus, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": np.array(group_of, np.int32),
    }
    return tensors, matrix


def awq_layer(rng: np.random.Generator, N: int, K: int, *, group: int = 32) -> Layer:
    """Version "gemm"."""
    codes, scales, zeros, matrix = draw(rng, N, K, 4, groups_of(rng, K, group, False), False)

    def shuffled(rows: np.ndarray) -> np.ndarray:
        order = [8 * word + output for word in range(N // 8) for output in AWQ_OUTPUTS]
        return packed_rows(rows[:, order], 4)

    tensors = {
        "qweight": shuffled(codes.T),
        "qzeros": shuffled(zeros.T),
        "scales": np.ascontiguousarray(scales.T),
    }
    return tensors, matrix


def packed_layer(
    rng: np.random.Generator,
    N: int,
    K: int,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> Layer:
    """compressed-tensors, "pack-quantized"."""
    group_of = groups_of(rng, K, group, act_order)
    codes, scales, zeros, matrix = draw(rng, N, K, bits, group_of, symmetric)
    tensors = {
        "weight_packed": packed_rows(codes, bits),
        "weight_scale": scales,
        "weight_shape": np.array([N, K], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed_rows(zeros.T, bits).T)
    if act_order:
        tensors["weight_g_idx"] = np.array(group_of, np.int32)
    return tensors, matrix


def int8_layer(rng: np.random.Generator, N: int, K: int, *, symmetric: bool = True) -> Layer:
    """compressed-tensors, "int-quantized", a scale per output row."""
    codes, scales, zeros, matrix = draw(rng, N, K, 8, [0] * K, symmetric)
    tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
    return tensors, matrix


def e4m3(bits: int) -> float:
    """The number of 8 bits: sign, 4 of exponent with bias 7, 3 of mantissa; no infinities."""
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8_layer(
    rng: np.random.Generator,
    N: int,
    K: int,
    *,
    block: tuple[int, int] = (128, 128),
    part: str = "weight_scale_inv",
) -> Layer:
    """DeepSeek's, a scale per block; blocks at the end may be partial."""
    bits = rng.integers(0, 256, (N, K)).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0
    rows, inputs = block
    scales = rng.uniform(1e-4, 2e-4, (-(-N // rows), -(-K // inputs))).astype(np.float32)
    matrix = np.empty((N, K))
    for n in range(N):
        for k in range(K):
            matrix[n, k] = e4m3(int(bits[n, k])) * float(scales[n // rows, k // inputs])
    return {"weight": bits.view(ml_dtypes.float8_e4m3fn), part: scales}, matrix


def packed_checkpoint(
    tensors: Mapping[str, np.ndarray], make: Callable[[int, int], Layer]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint's tensors with every linear layer packed: (as in the file, what they stand for).

    Embedding, unembedding and norms stay plain.
    """
    stored: dict[str, np.ndarray] = {}
    dense: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if "_proj.weight" not in name:
            stored[name] = dense[name] = tensor
            continue
        parts, matrix = make(*tensor.shape)
        stored |= {f"{name.removesuffix('.weight')}.{part}": parts[part] for part in parts}
        dense[name] = matrix.astype(np.float32)
    return stored, dense


def gptq_settings(**changed: Any) -> dict[str, Any]:
    """config.json's quantization_config."""
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
        "checkpoint_format": "gptq",
    } | changed  # fmt: skip


def awq_settings(**changed: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    } | changed  # fmt: skip


def compressed_settings(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
