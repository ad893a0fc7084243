"""How fast this machine's CPU reads memory and multiplies, measured in less than a second.

Float32, on XLA's own threads, because that is what an engine on this machine uses. The best of a
few runs counts: others may be using the machine, and a limit is wanted.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.core.machine_memory import machine_memory
from jaxserve.planning.devices import Device

_RUNS = 4
_ROWS, _COLUMNS = 16_384, 4096  # 268 MB: far more than any cache
_BATCH = 256


def measured_cpu() -> Device:
    """This machine as a device of the table; unknown speeds where JAX runs on something else."""
    title = "this machine's CPU"
    if jax.default_backend() != "cpu":
        return Device("cpu", title, "not measured: JAX runs on another device", machine_memory())
    weights = jnp.ones((_ROWS, _COLUMNS), jnp.float32)
    reading = _best(_product, jnp.ones((1, _COLUMNS)), weights)
    part = weights[:2048]
    multiplying = _best(_product, jnp.ones((_BATCH, _COLUMNS)), part)
    return Device(
        "cpu",
        title,
        "measured now: float32 products of one row, and of many",
        memory=machine_memory(),
        bandwidth=weights.nbytes / reading,
        rates={"float32": 2 * _BATCH * part.size / multiplying},
    )


@jax.jit
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _best(call: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Seconds of the fastest run, the first, which compiles, apart."""
    call(*args).block_until_ready()
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        call(*args).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
