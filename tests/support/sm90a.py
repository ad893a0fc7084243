"""Compiling and lowering kernels for a Hopper GPU in tests, on a machine that has none.

Full compilation wants the environment of `scripts/make_environment.py --sm90a`: tests that use it
carry the marker `sm90a`. Lowering to what the GPU compiler is given wants nothing but jax.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.planning.compiled_kernels import Report, compile_for_h200, lower_for_h200


def compile_sm90a(f: Callable[..., Any], *avals: Any) -> Report:
    """f compiled for an H200, for arguments of these shapes (arrays or ShapeDtypeStructs).

    Raises AssertionError if one of its kernels spills registers, and whatever the compilers raise
    for code that they refuse.
    """
    report = compile_for_h200(f, *avals)
    assert not report.spilling, f"registers are spilled: {report.spilling}"
    assert all(kernel.target == "sm_90a" for kernel in report.kernels)
    return report


def lower_cuda(f: Callable[..., Any], *avals: Any) -> jax.stages.Lowered:
    """f lowered for a CUDA GPU: layouts are inferred, nothing is compiled."""
    return lower_for_h200(f, *avals)
