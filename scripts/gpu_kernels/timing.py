"""Seconds of a compiled function, as the device takes them when calls follow each other."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

ROUNDS = 5
_LEAST_SECONDS = 0.05  # of a round: the host's own time then does not show


def seconds_a_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """The median of some rounds of calls that nobody waits for one by one."""
    placed = jax.device_put(arguments)
    compiled = jax.jit(function).lower(*placed).compile()
    for _ in range(3):  # XLA records a graph of kernels in the second call
        jax.block_until_ready(compiled(*placed))
    began = time.perf_counter()
    jax.block_until_ready(compiled(*placed))
    calls = max(1, min(200, int(_LEAST_SECONDS / max(time.perf_counter() - began, 1e-6))))
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            out = compiled(*placed)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - began) / calls)
    return median(rounds)
