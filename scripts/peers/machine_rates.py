"""What this machine can do: bytes read per second and float32 multiply rate, as one JSON line.

Usage: machine_rates.py THREADS; runs in a process of its own. Reading: every thread takes the dot
product of its part of a 512 MB buffer with itself, which reads it once. Multiplying: numpy's
product of two 2048 x 2048 float32 matrices, every thread its part of the rows. The best of several
tries, since both are limits.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by the import of numpy

import numpy as np

THREADS = int(sys.argv[1])
BUFFER_BYTES = 512 * 2**20
SIZE = 2048
TRIES = 10


def best_seconds(work: Callable[[np.ndarray], object], parts: list[np.ndarray]) -> float:
    """The shortest time to have `work` done on all parts, each by a thread of its own."""
    seconds = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(TRIES):
            start = time.perf_counter()
            list(pool.map(work, parts))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def read_rate() -> float:
    parts = np.array_split(np.ones(BUFFER_BYTES // 4, np.float32), THREADS)
    return BUFFER_BYTES / best_seconds(lambda part: part.dot(part), parts)


def multiply_rate() -> float:
    left, right = np.random.default_rng(0).random((2, SIZE, SIZE), np.float32)
    parts = np.array_split(left, THREADS)
    return 2 * SIZE**3 / best_seconds(lambda part: part @ right, parts)


if __name__ == "__main__":
    print(json.dumps({"bytes_per_second": read_rate(), "flop_per_second": multiply_rate()}))
