"""Named shapes of packed matrices, for tests and benchmarks alike: most divide no tile."""

from dataclasses import dataclass

from pallas_kernels.quantized_matmul.formats import FORMATS


@dataclass(frozen=True)
class Case:
    """A matrix [N, K]. group, zeros, perm: of grouped formats, see QuantizedArray."""

    format_name: str
    N: int
    K: int
    group: int = 0
    zeros: bool = False
    perm: bool = False

    @property
    def name(self) -> str:
        parts = [self.format_name, f"{self.N}x{self.K}"]
        if self.group:
            parts.append(f"group{self.group}")
        return "-".join(parts + ["zeros"] * self.zeros + ["perm"] * self.perm)


_DENSE = ("f32", "bf16", "f16")
_BLOCKS = tuple(form for form in FORMATS.values() if form.kind == "blocks")

CASES = (
    *(
        Case(name, N, K)
        for name in _DENSE
        for N, K in ((1, 1), (31, 33), (33, 100), (100, 257), (32, 256))
    ),
    *(
        Case(form.name, N, blocks * form.block_size)
        for form in _BLOCKS
        for N, blocks in ((1, 1), (31, 3), (33, 1), (100, 5), (64, 2))
    ),
    Case("int4", 1, 32, 32),
    Case("int4", 31, 96, 32, zeros=True),
    Case("int4", 33, 160, 32, zeros=True, perm=True),
    Case("int4", 100, 384, 128, zeros=True),
    Case("int4", 64, 512, 64),
    Case("int4", 7, 40, 40, zeros=True),
    Case("int4", 33, 288, 96, perm=True),
    Case("int8", 1, 1, 1),
    Case("int8", 31, 33, 33),
    Case("int8", 33, 100, 100, zeros=True),
    Case("int8", 100, 96, 32, zeros=True, perm=True),
    Case("int8", 64, 257, 257),
    Case("int8", 32, 640, 128),
    Case("fp8", 1, 1, 1),
    Case("fp8", 31, 33, 33),
    Case("fp8", 33, 384, 128),
    Case("fp8", 100, 100, 100),
    Case("fp8", 64, 257, 257),
)

# What the GPU kernels keep, each with its layout, in the size of an 8-billion-parameter Llama's
# smallest square matrix.
GPU_CASES = (
    *((Case(form.name, 4096, 4096), "gpu") for form in _BLOCKS if form.name != "mxfp4"),
    (Case("int4", 4096, 4096, 32, zeros=True), "gpu"),
    (Case("int4", 4096, 4096, 128, zeros=True), "gpu"),
    (Case("int8", 4096, 4096, 4096), "gpu"),
    (Case("fp8", 4096, 4096, 128), "gpu"),
    (Case("fp8", 4096, 4096, 4096), "gpu"),
    (Case("int8", 4096, 4096, 4096), "gpu_w8a8"),
    (Case("fp8", 4096, 4096, 128), "gpu_w8a8"),
    (Case("fp8", 4096, 4096, 4096), "gpu_w8a8"),
)
