"""The native CPU kernels, if they were built: C++ that XLA calls through its foreign functions.

The package installs without a compiler too; then `why_not()` says so and everything runs on the
references.
"""

import platform
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jax


@cache
def why_not() -> str | None:
    """None when the native kernels can be used, else the reason why they cannot."""
    try:
        native = import_module("pallas_kernels._native")
    except ImportError as error:
        return (
            f"the native CPU kernels are not built for {platform.machine()} ({error}); install "
            "a C++ compiler and reinstall jaxserve to get them"
        )
    try:
        native.isa()
    except RuntimeError as error:
        return str(error)
    built, have = native.ffi_api(), _ffi_api_of_jaxlib()
    if built > have:
        return (
            "the native CPU kernels were built for a newer jaxlib (XLA FFI "
            f"{built[0]}.{built[1]}) than this one ({have[0]}.{have[1]}); reinstall jaxserve here, "
            "or upgrade jax"
        )
    for name, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return None


def _ffi_api_of_jaxlib() -> tuple[int, int]:
    """(major, minor): XLA refuses to start with handlers that were built for a later one."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    numbers = dict(
        re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8"))
    )
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def module() -> Any:
    """The module itself, its FFI targets registered. Raises RuntimeError when there is none."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    return import_module("pallas_kernels._native")


def isa() -> str:
    """The instruction set the kernels use: baseline, avx2 or avx512."""
    return str(module().isa())
