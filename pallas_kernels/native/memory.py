"""Memory for weights that are read from end to end in every step.

Small pages cost a native kernel a quarter of its speed here: each 4 KiB needs a translation, and
on a virtual machine a costly one. So packed weights share large regions for which the system is
asked to use 2 MiB pages. A region lives as long as an array in it does.
"""

import contextlib
import mmap
import threading

import numpy as np

ALIGNMENT = 64  # of buffers that XLA takes over without copying
REGION_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20


class Regions:
    """Hands out pieces of regions, one after the other. Safe to use from several threads."""

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)

    def empty(self, size: int) -> np.ndarray:
        """`size` bytes [size] uint8, aligned, zero. What is never touched takes no memory."""
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if rounded > self._free.size:
                if rounded > self._region_bytes // 2:
                    return _region(rounded)[:size]
                self._free = _region(self._region_bytes)
            piece, self._free = self._free[:size], self._free[rounded:]
        return piece


def _region(size: int) -> np.ndarray:
    """A mapping of its own, beginning at a huge page and of at least `size` bytes."""
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without them small pages serve as well, only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]
