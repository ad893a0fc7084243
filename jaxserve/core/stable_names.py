"""Text that names a value the same way in every process, or says that there is none.

What a traced program is filed under: equal texts must mean equal programs, so whatever cannot be
told apart for sure (a closure, a function of somebody else's module) has no name here.
"""

import dataclasses
import hashlib
import inspect
import os
import platform
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from pallas_kernels import native

_ROOT = Path(__file__).resolve().parents[1]
# What the layers below the engine's host side are made of, and its programs.
_TRACED_SOURCE = (
    "core/*.py",
    "layers/*.py",
    "models/**/*.py",
    "sampling/*.py",
    "engine/page_programs.py",
    "engine/programs.py",
    "engine/proposers/*_programs.py",
    "sampling_params.py",
)
_OWN_PACKAGES = ("jaxserve", "pallas_kernels")
# Settings of JAX that change no program: where things are kept and what is logged.
_IDLE_SETTINGS = ("cache", "log", "dump", "_dir")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAXSERVE_CPU_ISA")


class NoStableNameError(ValueError):
    """The value cannot be told from another one across processes."""


def stable_name(value: Any) -> str:
    """A text equal for equal values only. Raises NoStableNameError where that cannot be promised.

    Numbers, strings, dtypes, tuples, lists, dicts, dataclasses, partials, and classes and top-level
    functions of our own packages, whose source `surroundings` covers.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({','.join(map(stable_name, value))})"
    if isinstance(value, Mapping):
        items = (f"{stable_name(key)}:{stable_name(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            f"{field.name}={stable_name(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
        )
        return f"{_own_name(type(value))}({','.join(fields)})"
    if isinstance(value, partial):
        return f"partial{stable_name((value.func, value.args, value.keywords))}"
    return _own_name(value)


def _own_name(value: Any) -> str:
    """Of a class or a function, jitted or not, that a module of ours defines at its top."""
    value = inspect.unwrap(value) if callable(value) else value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    ours = isinstance(module, str) and module.partition(".")[0] in _OWN_PACKAGES
    if not ours or not isinstance(name, str) or "<" in name:
        raise NoStableNameError(f"a {type(value).__name__} of {module}.{name}")
    return f"{module}.{name}"


def surroundings() -> str:
    """Everything else a program depends on: our source, JAX, its settings, the kind of machine."""
    settings = {
        name: repr(value)
        for name, value in jax.config.values.items()
        if not any(part in name for part in _IDLE_SETTINGS)
    }
    device = jax.devices()[0]
    facts = (
        (jax.__version__, jaxlib.__version__, _source_hash()),
        (platform.machine(), device.platform, device.device_kind, len(jax.devices())),
        native.isa() if native.why_not() is None else "no native kernels",
        sorted(settings.items()),
        [os.environ.get(name) for name in _ENVIRONMENT],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@cache
def _source_hash() -> str:
    """Of all source that programs are traced from."""
    digest = hashlib.sha256()
    for pattern in _TRACED_SOURCE:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(_ROOT)}\0".encode())
            digest.update(path.read_bytes())
    for path in sorted(Path(native.__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
