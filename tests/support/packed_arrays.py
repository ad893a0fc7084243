"""Random packed matrices, and what they stand for by other means than pallas_kernels.

Blocks: the gguf package. Groups: the formula in float64, with ml_dtypes for 8-bit floats.
"""

import gguf
import ml_dtypes
import numpy as np

from pallas_kernels.quantized_matmul import FORMATS, QuantizedArray
from pallas_kernels.quantized_matmul.cases import Case
from tests.support.gguf_files import Q, random_packed

_DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def random_array(case: Case, seed: int = 0) -> QuantizedArray:
    """Random codes with scales of a layer's size; parts are numpy arrays in the layout "rows"."""
    rng = np.random.default_rng(seed)
    N, K = case.N, case.K
    form = FORMATS[case.format_name]
    if form.kind == "dense":
        values = rng.normal(size=(N, K)).astype(_DTYPES[form.name])
        return QuantizedArray({"values": values}, form.name, (N, K))
    if form.kind == "blocks":
        return QuantizedArray(
            {"blocks": random_packed((N, K), Q[form.name.upper()], rng)}, form.name, (N, K)
        )
    groups = (N, K // case.group)
    scales = rng.uniform(0.001, 0.1, groups).astype(np.float32)
    parts: dict[str, np.ndarray] = {"scales": scales}
    if form.name == "int4":
        parts["codes"] = rng.integers(0, 256, (N, K // 2), np.uint8)
        parts["zeros"] = rng.integers(0, 16, groups, np.uint8)
    elif form.name == "int8":
        parts["codes"] = rng.integers(-128, 128, (N, K), np.int8)
        parts["zeros"] = rng.integers(-128, 128, groups, np.int8)
    else:
        numbers = rng.normal(scale=50, size=(N, K)).clip(-448, 448)
        parts["codes"] = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if not case.zeros:
        parts.pop("zeros", None)
    if case.perm:
        parts["perm"] = rng.permutation(K).astype(np.int32)
    return QuantizedArray(parts, form.name, (N, K), case.group)


def expansion(w: QuantizedArray) -> np.ndarray:
    """float64 [N, K] that `w` stands for, columns in the order of the inputs."""
    parts = {name: np.asarray(part) for name, part in w.parts.items()}
    if w.format.kind == "dense":
        return parts["values"].astype(np.float64)
    if w.format.kind == "blocks":
        kind = gguf.GGMLQuantizationType[w.format_name.upper()]
        return gguf.dequantize(parts["blocks"], kind).astype(np.float64)
    kept = np.empty(w.shape)
    for column in range(w.shape[1]):
        group = column // w.group
        zero = parts["zeros"][:, group].astype(np.float64) if "zeros" in parts else 0.0
        kept[:, column] = (_codes(w.format_name, parts["codes"], column) - zero) * parts["scales"][
            :, group
        ]
    if "perm" not in parts:
        return kept
    result = np.empty_like(kept)
    result[:, parts["perm"]] = kept
    return result


def _codes(format_name: str, codes: np.ndarray, column: int) -> np.ndarray:
    if format_name == "int4":
        return (codes[:, column // 2] // 16 ** (column % 2) % 16).astype(np.float64)
    if format_name == "fp8":
        return codes[:, column].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return codes[:, column].astype(np.float64)
