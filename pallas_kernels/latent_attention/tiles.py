"""How latent attention is cut for Hopper: blocks of 64 (token, head) rows, and splits of the KV.

A row's output is 512 numbers wide, so 64 rows of float32 sums fill two warpgroups' registers (128
a thread) and a thread block of 64 queries of 576 numbers and two tiles of 64 tokens fills its
shared memory: one block an SM is all there can be, and what is left to choose is how many blocks
share a row's tokens.
"""

import math
from dataclasses import dataclass

# Query rows of a thread block (a wgmma's height) and tokens of a tile of the cache.
ROWS = 64
KEYS = 64


@dataclass(frozen=True)
class Tiles:
    """One row of the table: up to this many blocks of query rows, cut the KV into `splits`."""

    max_blocks: float
    splits: int
    reason: str


TILES = (
    Tiles(8, 16, "up to 128 of 132 SMs; more splits and their merge weighs more than their share"),
    Tiles(16, 8, "16 blocks of rows by 8 fill 128 SMs once"),
    Tiles(33, 4, "33 by 4 fill 132 SMs once"),
    Tiles(66, 2, "66 by 2 fill 132 SMs once"),
    Tiles(math.inf, 1, "every SM has a block of its own; partial sums would only add bytes"),
)


def pick_splits(blocks: int, longest: int) -> int:
    """The table's splits for this many blocks of query rows; never so many that a context of
    `longest` tokens leaves one fewer than four tiles, as its float32 sums are worth two."""
    row = next(row for row in TILES if blocks <= row.max_blocks)
    return max(1, min(row.splits, longest // (4 * KEYS)))
