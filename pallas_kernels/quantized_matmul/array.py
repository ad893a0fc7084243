"""A weight matrix kept packed: what layers hold where a plain array would hold every number.

One type for all formats and backends. A checkpoint's reader makes it in the layout "rows", which
is the meaning; a backend repacks it once, at load, into the layout its kernels read, losing
nothing (`pallas_kernels.quantized_matmul.repack`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax

from pallas_kernels.quantized_matmul.formats import FORMATS, Format


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parts"],
    meta_fields=["format_name", "shape", "group", "layout"],
)
@dataclass(frozen=True)
class QuantizedArray:
    """A matrix [N, K] (output rows first) in the format `format_name`.

    parts, by layout and kind of format:
      "rows", dense:    values [N, K] float32, bfloat16 or float16
      "rows", grouped:  codes: int4 uint8 [N, K / 2], input 2i in the low nibble of byte i;
                               int8 int8 [N, K]; fp8 uint8 [N, K], the bits of e4m3
                        scales float32 [N, K / group]
                        zeros (optional, not with fp8) uint8 (int4) or int8 (int8) [N, K / group]
      "rows", blocks:   blocks uint8 [N, K / block_size * block_bytes]
      "panels":         panels uint8 [ceil(N / 32), bytes]: 32 output rows side by side, for the
                        native CPU kernels (see cpu.py)
      "gpu":            codes and scales apart, for the Hopper kernels (see gpu_layout.py)
      "gpu_w8a8":       the same parts; products round their activations to 8 bits
      and in any layout perm int32 [K] (optional): column j of the matrix as kept multiplies
      input perm[j] (GPTQ's act-order, which sorts columns by group).
    group: inputs that share a scale, for grouped formats; K where one scale serves a row; else 0.
    """

    parts: Mapping[str, jax.Array]
    format_name: str
    shape: tuple[int, int]
    group: int = 0
    layout: str = "rows"

    @property
    def format(self) -> Format:
        return FORMATS[self.format_name]

    @property
    def nbytes(self) -> int:
        """Bytes all parts take."""
        return sum(part.nbytes for part in self.parts.values())


@partial(jax.tree_util.register_dataclass, data_fields=["pieces"], meta_fields=[])
@dataclass(frozen=True)
class StackedRows:
    """Matrices on the same inputs whose output rows follow each other as one matrix [sum N, K].

    Where a fused matrix (queries, keys and values, say) is kept in several formats. Pieces of the
    same format and group are joined by the reader, so neighbours differ.
    """

    pieces: tuple[QuantizedArray, ...] = field(default=())

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)
