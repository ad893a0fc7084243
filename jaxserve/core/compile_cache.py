"""Compiled programs on disk, and a count of the compilations that happen anyway."""

import logging
import os
import stat
import threading
from pathlib import Path

import jax

log = logging.getLogger(__name__)

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
    A cache that is set already (JAX_COMPILATION_CACHE_DIR, an embedding program) stays. What lies
    in the folder is run: one that others may write to is left alone, with a warning.
    """
    if jax.config.jax_compilation_cache_dir is None:
        problem = make_private(folder)
        if problem is not None:
            log.warning("compiled programs are not kept, so every start is slow: %s", problem)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compile_cache_folder() -> Path | None:
    """Where JAX keeps compiled programs, if that is a folder on this machine."""
    folder = jax.config.jax_compilation_cache_dir
    return None if folder is None or "://" in folder else Path(folder)


def make_private(folder: Path) -> str | None:
    """Make a folder that only its owner can write to. Returns what is wrong if it is not ours."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}; give it to the user who runs this"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {folder}; chmod go-w it"
    return None
