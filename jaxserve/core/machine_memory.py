"""How much memory this machine lets the process have. Plain Python: no jax."""

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def machine_memory(cgroup_limit: Path = _CGROUP_LIMIT) -> int | None:
    """Bytes of memory, or of the container's share of it; None where the system does not say."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    try:
        limit = int(cgroup_limit.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or "max"
        return installed
    return min(installed, limit)
