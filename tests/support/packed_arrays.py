"""Random packed matrices, and what they stand for by other means than pallas_kernels.

Blocks: the gguf package. Groups: the formula in float64, with ml_dtypes for 8-bit floats.
"""

import gguf
import ml_dtypes
import numpy as np

from pallas_kernels.quantized_matmul import FORMATS, QuantizedArray
from pallas_kernels.quantized_matmul.cases import Case

# Where a block type has float16 numbers: offsets of its scale, and of its offset or minimum scale.
_HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (),
}  # fmt: skip
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
        return QuantizedArray({"blocks": _random_blocks(case, rng)}, form.name, (N, K))
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


def _random_blocks(case: Case, rng: np.random.Generator) -> np.ndarray:
    form = FORMATS[case.format_name]
    count = case.N * case.K // form.block_size
    blocks = rng.integers(0, 256, (count, form.block_bytes), np.uint8)
    for offset in _HALVES[form.name]:
        halves = rng.normal(scale=0.02, size=(count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    if form.name == "mxfp4":
        blocks[:, 0] = rng.integers(118, 128, count)
    return blocks.reshape(case.N, -1)


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
