"""How much of a GPU's memory XLA may use: fixed when its backend starts, once a process."""

import os

import jax

_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # XLA's GPU client reads it; its own default is 0.75


def use_gpu_memory(share: float) -> None:
    """Let XLA use this share of every GPU, unless the environment says another one already."""
    os.environ.setdefault(_VARIABLE, f"{share:g}")


def usable_memory(device: jax.Device) -> int | None:
    """Bytes that XLA may use of a GPU; None for a CPU, or where the device does not say."""
    if device.platform != "gpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)
