"""How much memory this process has used at most."""

import resource
import sys

import jax


def peak_memory_bytes() -> int:
    """The accelerator's peak where it counts one, else the process's resident memory.

    That includes pages of weight files that were read by mapping them.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats and jax.default_backend() != "cpu":
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
