"""What a QuantizedArray must satisfy before any kernel sees it.

Kernels trust the shapes they are given, the native ones with raw memory, and a checkpoint may say
anything. So every array is checked here, in Python, when it is made from a file and when it is
repacked. Only shapes and types are looked at (which also works on traced arrays), apart from the
column order, whose values index memory.
"""

from typing import Any

import numpy as np

from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.formats import FORMATS, Format
from pallas_kernels.quantized_matmul.gpu_layout import LAYOUTS as GPU_LAYOUTS
from pallas_kernels.quantized_matmul.gpu_layout import part_shapes

LAYOUTS = ("rows", "panels", *GPU_LAYOUTS)
MAX_DIM = 2**31 - 1  # kernels count rows and columns in 32 bits
_DENSE_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_CODE_TYPES = {"int4": "uint8", "int8": "int8", "fp8": "uint8"}


def check_array(w: QuantizedArray) -> None:
    """ValueError, saying got and want, unless `w` is what array.py describes.

    Layouts "rows" and "gpu": everything. Layout "panels": the name, type and number of dimensions
    of the parts; the rest is the native kernels' own, see cpu.py.
    """
    if not isinstance(w, QuantizedArray):
        raise ValueError(f"want a QuantizedArray, got {type(w).__name__}")
    if w.format_name not in FORMATS:
        raise ValueError(f"format is {str(w.format_name)[:40]!r}; choose {', '.join(FORMATS)}")
    if w.layout not in LAYOUTS:
        raise ValueError(f"layout is {str(w.layout)[:40]!r}; choose {', '.join(LAYOUTS)}")
    _check_shape(w)
    _check_group(w)
    wanted = _wanted_parts(w)
    _check_names(w, set(wanted))
    for name, (dtype, shape) in wanted.items():
        if name in w.parts:
            _check_part(w, name, dtype, shape)
    if "perm" in w.parts:
        _check_perm(w)


def _fail(w: QuantizedArray, problem: str) -> None:
    raise ValueError(f"a {w.format_name} matrix {str(w.shape)[:60]}: {problem}")


def _check_shape(w: QuantizedArray) -> None:
    shape = w.shape
    if (
        not isinstance(shape, tuple)
        or len(shape) != 2
        or any(type(dim) is not int for dim in shape)
    ):
        _fail(w, "want a shape of two integers, (output rows, inputs)")
    if not all(1 <= dim <= MAX_DIM for dim in shape):
        _fail(w, f"want 1 to {MAX_DIM} rows and inputs")


def _check_group(w: QuantizedArray) -> None:
    K = w.shape[1]
    form = w.format
    if type(w.group) is not int:
        _fail(w, f"group is {str(w.group)[:40]!r}, want an integer")
    if form.kind != "grouped":
        if w.group != 0:
            _fail(w, f"group is {w.group}, want 0: only grouped formats have groups")
        if K % form.block_size:
            _fail(w, f"{K} inputs are not whole blocks of {form.block_size}")
        return
    if not 1 <= w.group <= K or K % w.group:
        _fail(w, f"groups of {w.group} do not divide {K} inputs")
    if w.format_name == "int4" and K % 2:
        _fail(w, f"{K} inputs do not fill bytes of two codes")


def _wanted_parts(w: QuantizedArray) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    if w.layout == "panels":
        return _panel_parts()
    if w.layout in GPU_LAYOUTS:
        return {name: (dtype, shape) for name, (dtype, shape) in part_shapes(w).items()}
    return _row_parts(w)


def _row_parts(w: QuantizedArray) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Name -> type and shape of every part the format may have in the layout "rows"."""
    form: Format = w.format
    N, K = w.shape
    if form.kind == "dense":
        return {"values": (_DENSE_TYPES[form.name], (N, K))}
    if form.kind == "blocks":
        return {"blocks": ("uint8", (N, K // form.block_size * form.block_bytes))}
    codes = _CODE_TYPES[form.name]
    parts: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "codes": (codes, (N, K * form.bits // 8)),
        "scales": ("float32", (N, K // w.group)),
    }
    if form.name != "fp8":
        parts["zeros"] = (codes, (N, K // w.group))
    return parts


def _panel_parts() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    return {"panels": ("uint8", (None, None))}


def _check_names(w: QuantizedArray, allowed: set[str]) -> None:
    needed = allowed - {"zeros"}
    names = set(w.parts)
    if not needed <= names <= allowed | {"perm"}:
        got, want = (", ".join(sorted(str(name)[:40] for name in some)) for some in (names, needed))
        may = ", ".join(sorted(allowed - needed | {"perm"}))
        _fail(
            w, f"the parts in layout {w.layout!r} are {got or 'none'}; want {want}, perhaps {may}"
        )


def _check_part(w: QuantizedArray, name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
    part: Any = w.parts[name]
    got_dtype, got_shape = str(getattr(part, "dtype", None)), getattr(part, "shape", None)
    if got_dtype != dtype:
        _fail(w, f"{name} is of type {got_dtype[:40]}, want {dtype}")
    fits = (
        isinstance(got_shape, tuple)
        and len(got_shape) == len(shape)
        and all(want in (None, got) for got, want in zip(got_shape, shape, strict=True))
    )
    if not fits:
        want = str(list(shape)).replace("None", "any")
        got = None if got_shape is None else list(got_shape)
        _fail(w, f"{name} has the shape {str(got)[:60]}, want {want}")


def _check_perm(w: QuantizedArray) -> None:
    K = w.shape[1]
    _check_part(w, "perm", "int32", (K,))
    perm = w.parts["perm"]
    if isinstance(perm, np.ndarray):
        in_range = ((perm >= 0) & (perm < K)).all()
        if not in_range or np.bincount(perm, minlength=K).max() != 1:
            _fail(w, f"perm is not an order of the inputs 0 to {K - 1}")
