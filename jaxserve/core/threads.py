"""How many threads XLA computes with on a CPU: fixed when its backend starts, once a process."""

import os

from jax._src import xla_bridge  # no public name says whether a backend has been started

from jaxserve.config import MAX_THREADS
from jaxserve.errors import InvalidRequestError

# Each warpgroup of an interpreted kernel holds one of XLA's threads and waits for others, and XLA
# compiles on the same ones: on a machine of few cores none would be left, and nothing would move.
_INTERPRETER_THREADS = 16
_VARIABLE = "PJRT_NPROC"  # XLA's CPU client reads it, and takes all cores where it is not set


def use_threads(count: int | None, *, interpreting: bool = False) -> None:
    """Let XLA, and our kernels, which run on its pool, compute on `count` threads; None: as it is.

    interpreting: GPU kernels are to be interpreted, so None stands for enough threads for that.
    Raises InvalidRequestError if count is out of range, or JAX has started with another number.
    """
    if count is None:
        if interpreting and not xla_bridge.backends_are_initialized():
            os.environ.setdefault(_VARIABLE, str(max(_INTERPRETER_THREADS, os.cpu_count() or 1)))
        return
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_THREADS:
        raise InvalidRequestError(
            f"threads is {count!r}; give a whole number 1 to {MAX_THREADS}", "threads"
        )
    if os.environ.get(_VARIABLE) == str(count):
        return
    if xla_bridge.backends_are_initialized():
        raise InvalidRequestError(
            f"threads is {count}, but JAX has started in this process and keeps the threads it "
            "started with; set threads before anything uses JAX, or set the environment variable "
            f"{_VARIABLE}={count}",
            "threads",
        )
    os.environ[_VARIABLE] = str(count)
