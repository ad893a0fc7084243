"""How much of a GPU's memory XLA may use: fixed when its backend starts, once a process."""

import os

import jax

from jaxserve.core.machine_memory import machine_memory

_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # XLA's GPU client reads it; its own default is 0.75


def use_gpu_memory(share: float) -> None:
    """Let XLA use this share of every GPU, unless the environment says another one already."""
    os.environ.setdefault(_VARIABLE, f"{share:g}")


def device_memory(device: jax.Device) -> int | None:
    """Bytes that the device, or for a CPU this machine, has; None where that is not known."""
    if device.platform == "cpu":
        return machine_memory()
    share, usable = os.environ.get(_VARIABLE), usable_memory(device)
    return None if share is None or usable is None else int(usable / float(share))


def usable_memory(device: jax.Device) -> int | None:
    """Bytes that XLA may use of a GPU; None for a CPU, or where the device does not say."""
    if device.platform != "gpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)
