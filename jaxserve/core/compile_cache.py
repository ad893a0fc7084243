"""Compiled programs on disk, and a count of the compilations that happen anyway."""

import threading
from pathlib import Path

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter(threading.local):
    """How many programs XLA compiled or loaded on the calling thread, since it began."""

    count = 0


compilations = CompileCounter()


def _on_event(name: str, _seconds: float, **_: str | int) -> None:
    if name == _COMPILE_EVENT:
        compilations.count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def use_compile_cache(folder: Path) -> None:
    """Keep every compiled program under `folder`, however small or quickly compiled.

    JAX by default skips programs that compile in under a second: those add up to a slow start.
    A cache that is set already (JAX_COMPILATION_CACHE_DIR, an embedding program) stays.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
