"""The memory of an engine, added up before it serves. Plain Python: no jax.

On a GPU the pool takes what the rest leaves of the share that may be used; on a CPU its size is
given (--kv-memory), and the sum is held against the machine's memory.
"""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class MemoryPlan:
    """All in bytes. temporaries: at the peak of the largest step, which is `bucket`.

    device_memory: all there is; None: not known. usable: the share of it that the engine may fill;
    None: whatever it needs (CPU). host_tier is memory of the host, not of a GPU.
    """

    weights: int
    pool: int
    temporaries: int
    sampling_state: int
    host_tier: int = 0
    bucket: str = ""
    device: str = "cpu"
    device_memory: int | None = None
    usable: int | None = None

    @property
    def on_device(self) -> int:
        """What the device holds; on a CPU the host tier is in the same memory."""
        total = self.weights + self.pool + self.temporaries + self.sampling_state
        return total + self.host_tier if self.device == "cpu" else total

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """What takes memory, and how much."""
        steps = f"temporaries of {self.bucket}" if self.bucket else "temporaries"
        rows = (
            ("weights", self.weights),
            ("KV pool", self.pool),
            (steps, self.temporaries),
            ("sampling state", self.sampling_state),
        )
        return (*rows, ("KV in host memory", self.host_tier)) if self.host_tier else rows

    @property
    def warning(self) -> str | None:
        """What is wrong with the plan, in a line; None if it fits."""
        limit = self.device_memory if self.usable is None else self.usable
        if limit is None or self.on_device <= limit:
            return None
        where = "this machine has" if self.device == "cpu" else f"{self.device} may use"
        return (
            f"the plan takes {size_text(self.on_device)} and {where} {size_text(limit)}; "
            "lower --kv-memory, --max-batch-tokens or --max-batch-rows, or pack the weights with "
            "--quantization"
        )

    def lines(self) -> list[str]:
        """The plan as a table, for terminals and logs."""
        total = "together"
        if self.device_memory is not None:
            total += f", of {size_text(self.device_memory)}"
        rows = [*self.rows, (total, self.on_device)]
        width = max(len(name) for name, _ in rows)
        return [f"  {name:<{width}}  {size_text(number):>12}" for name, number in rows]


def pool_budget(usable: int, *, weights: int, temporaries: int, sampling_state: int) -> int:
    """Bytes that are left for the pool. Raises InvalidRequestError if there are none."""
    left = usable - weights - temporaries - sampling_state
    if left <= 0:
        raise InvalidRequestError(
            f"the weights take {size_text(weights)}, the largest step {size_text(temporaries)} and "
            f"the sampling state {size_text(sampling_state)}, but {size_text(usable)} of the "
            "device may be used, so nothing is left for the KV pool; pack the weights with "
            "--quantization, lower --max-batch-tokens, or raise --gpu-memory-utilization",
            "gpu_memory_utilization",
        )
    return left


def size_text(num_bytes: float) -> str:
    """In powers of 1000, as data sheets count: 26.84 GB, 819.20 kB, 16 bytes."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 999.995 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} bytes" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"
