"""What the vendors promise of the devices a plan can be made for. Plain Python: no jax.

Rates are of dense products: where a data sheet states a figure "with sparsity", half of it. Memory
is the data sheet's number in units of 10^9 bytes; drivers report up to a twentieth more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxserve.errors import InvalidRequestError


@dataclass(frozen=True)
class Device:
    """memory in bytes, bandwidth in bytes/s, rates in operations/s by the operands' type.

    None, or a type that is missing: unknown. source: where the numbers are from.
    """

    name: str
    title: str
    source: str
    memory: int | None = None
    bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def is_hopper(self) -> bool:
        """Whether our GPU kernels run on it."""
        return self.name in ("h200", "h100")


GPUS: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "h200",
                "NVIDIA H200 SXM",
                "NVIDIA H200 Tensor Core GPU data sheet",
                memory=141 * 10**9,
                bandwidth=4.8e12,
                rates={"bfloat16": 989.5e12, "fp8": 1979e12, "int8": 1979e12, "float32": 67e12},
            ),
            Device(
                "h100",
                "NVIDIA H100 SXM",
                "NVIDIA H100 Tensor Core GPU data sheet",
                memory=80 * 10**9,
                bandwidth=3.35e12,
                rates={"bfloat16": 989.5e12, "fp8": 1979e12, "int8": 1979e12, "float32": 67e12},
            ),
            Device(
                "a100",
                "NVIDIA A100 80GB SXM",
                "NVIDIA A100 Tensor Core GPU data sheet",  # no 8-bit floats
                memory=80 * 10**9,
                bandwidth=2.039e12,
                rates={"bfloat16": 312e12, "int8": 624e12, "float32": 19.5e12},
            ),
            Device(
                "l4",
                "NVIDIA L4",
                "NVIDIA L4 Tensor Core GPU data sheet",
                memory=24 * 10**9,
                bandwidth=300e9,
                rates={"bfloat16": 121e12, "fp8": 242.5e12, "int8": 242.5e12, "float32": 30.3e12},
            ),
        )
    }
)
DEVICE_NAMES = (*GPUS, "cpu")


def find_gpu(name: str) -> Device:
    """The row of a GPU. Raises InvalidRequestError that lists what there is."""
    device = GPUS.get(name)
    if device is None:
        raise InvalidRequestError(
            f"device is {name[:40]!r}; choose {', '.join(DEVICE_NAMES)}", "device"
        )
    return device
