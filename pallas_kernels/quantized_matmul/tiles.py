"""Tiles of the GPU product, by shape: a table with a reason in each row.

Not measured on a GPU: chosen from counts of bytes, instructions and registers.
`scripts/tune_kernels` writes better ones where it has run; a caller may pass its own.
"""

from dataclasses import dataclass, replace

BANDWIDTH_CTAS = 264  # two thread blocks on each of an H200's 132 multiprocessors


@dataclass(frozen=True)
class Tiles:
    """One thread block makes [block_n, block_m] of the product in steps of block_k inputs.

    Two warpgroups, block_n / 2 rows each (64 or 128). stages: steps on their way at once.
    shared: bytes of shared memory a thread block may take; where stages do not fit, fewer are used.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    shared: int

    def __post_init__(self) -> None:
        fits = (
            self.block_m in (8, 16, 32, 64, 128)
            and self.block_n in (128, 256)
            and self.block_k in (128, 256)
            and self.stages >= 2
        )
        if not fits:
            raise ValueError(
                f"got {self}; want block_m 8, 16, 32, 64 or 128, block_n 128 or 256, block_k 128 "
                "or 256, two stages or more"
            )


@dataclass(frozen=True)
class Row:
    """Products of up to `max_rows` activations' rows; `reason`: why these tiles."""

    max_rows: int
    tiles: Tiles
    reason: str


_TWO_RESIDENT = 112 * 1024  # thread blocks on a multiprocessor, of its 228 KB
_ONE_RESIDENT = 224 * 1024

TABLE = (
    Row(
        8, Tiles(8, 128, 256, 6, _TWO_RESIDENT),
        "8 columns are the least a tensor core takes; two thread blocks to a multiprocessor, so "
        "that one widens codes while the other waits; 256 four-bit codes are a whole cache line",
    ),
    Row(
        16, Tiles(16, 128, 128, 6, _TWO_RESIDENT),
        "groups' sums are still fewer than weights, so scales go onto sums; shorter steps, or they "
        "would take more than the 128 registers that let two thread blocks in",
    ),
    Row(
        32, Tiles(32, 128, 128, 6, _TWO_RESIDENT),
        "sums outnumber weights of small groups from here on: scales go onto the weights",
    ),
    Row(
        64, Tiles(64, 128, 128, 4, _TWO_RESIDENT),
        "16 KB of activations to a step, and 32 KB of results: three or four steps fit",
    ),
    Row(
        256, Tiles(128, 128, 128, 4, _ONE_RESIDENT),
        "weights are widened once for 128 rows; 128 outputs, so that a layer still makes enough "
        "thread blocks for every multiprocessor",
    ),
    Row(
        2**31 - 1, Tiles(128, 256, 128, 3, _ONE_RESIDENT),
        "a large tile reads the least through the L2 cache for each operation; 128 registers of "
        "sums a thread are what two warpgroups can hold",
    ),
)  # fmt: skip


def choose_tiles(rows: int, outputs: int, high_bits: int = 0) -> Tiles:
    """Tiles for `rows` rows of activations and `outputs` (padded) rows of the matrix.

    high_bits: of an input, kept apart (see gpu_layout.py).
    """
    tiles = next(row for row in TABLE if rows <= row.max_rows).tiles
    if outputs % tiles.block_n:
        tiles = replace(tiles, block_n=128)
    if high_bits == 1:  # comes in chunks of 256 inputs, which want much shared memory
        shared = tiles.shared if tiles.block_m <= 32 else _ONE_RESIDENT
        return replace(tiles, block_m=min(64, tiles.block_m), block_k=256, shared=shared)
    # Pairs of bits have groups of 16 inputs, whose sums would fill the registers in long steps.
    return replace(tiles, block_k=128) if high_bits == 2 else tiles


def choose_splits(steps: int, thread_blocks: int) -> int:
    """Into how many pieces K is cut: until the GPU is full, but at least two steps to each."""
    wanted = max(1, min(BANDWIDTH_CTAS // max(thread_blocks, 1), steps // 2))
    return -(-steps // -(-steps // wanted))  # none without a step
