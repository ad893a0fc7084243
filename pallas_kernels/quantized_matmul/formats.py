"""The formats a weight matrix may be kept in, and what each one's numbers mean.

Plain Python: no jax. Three kinds:

dense      one number per weight (f32, bf16, f16).
grouped    codes with a scale, and perhaps a zero point, per output row and group of `group`
           inputs: w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], g = k // group.
blocks     the block types of GGUF files, byte for byte as the file has them.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Format:
    """kind: "dense", "grouped" or "blocks". bits: of one code. native_id: its number in cpu.cc.

    block_size, block_bytes: of a GGUF block type, else 1 and 0.
    """

    name: str
    kind: str
    bits: int
    native_id: int
    block_size: int = 1
    block_bytes: int = 0


FORMATS = MappingProxyType(
    {
        form.name: form
        for form in (
            Format("f32", "dense", 32, 0),
            Format("bf16", "dense", 16, 1),
            Format("f16", "dense", 16, 2),
            Format("int4", "grouped", 4, 10),  # unsigned codes 0..15
            Format("int8", "grouped", 8, 11),  # signed codes
            Format("fp8", "grouped", 8, 12),  # e4m3 (OCP FP8, arXiv:2209.05433), no zero point
            Format("q4_0", "blocks", 4, 20, 32, 18),
            Format("q4_1", "blocks", 4, 21, 32, 20),
            Format("q5_0", "blocks", 5, 22, 32, 22),
            Format("q5_1", "blocks", 5, 23, 32, 24),
            Format("q8_0", "blocks", 8, 24, 32, 34),
            Format("q4_k", "blocks", 4, 25, 256, 144),
            Format("q5_k", "blocks", 5, 26, 256, 176),
            Format("q6_k", "blocks", 6, 27, 256, 210),
            Format("mxfp4", "blocks", 4, 28, 32, 17),
        )
    }
)
