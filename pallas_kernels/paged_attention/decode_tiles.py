"""Tiles of the Mosaic GPU decode kernel, with the reason of each.

Shared memory of a thread block bounds how many of them live on one multiprocessor (227 KB), and
what is in flight there must cover the latency of memory: about 23 KB at 4.3 TB/s and 700 ns.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTile:
    """Shape of the decode kernel's work.

    keys: of one step, 64 or 128. stages: tiles in the ring. columns: query columns of a warpgroup,
    a multiple of 8. groups: warpgroups of a thread block at most; what is left over is another
    block's, which reads the keys again. blocks: thread blocks that share a multiprocessor, which
    is how many it takes to fill the GPU. min_keys: of one split.
    """

    keys: int
    stages: int
    columns: int
    groups: int
    blocks: int
    min_keys: int
    reason: str


# (head_dim up to, bits of a cached number): tile. Two warpgroups leave a thread its 255 registers;
# where sums of 64 columns beside operands that pass through registers would spill, it is 32.
DECODE_TILES: dict[tuple[int, int], DecodeTile] = {
    (64, 16): DecodeTile(128, 2, 64, 2, 3, 512, "32 KB a tile: 128 keys halve the steps"),
    (96, 16): DecodeTile(64, 3, 32, 2, 2, 512, "20 or 24 KB a tile: a third stage, for latency"),
    (128, 16): DecodeTile(64, 2, 64, 2, 3, 512, "32 KB a tile: 3 blocks, for loads and softmax"),
    (256, 16): DecodeTile(64, 2, 32, 2, 1, 512, "64 KB a tile; queries of two groups, 32 KB more"),
    (64, 8): DecodeTile(64, 4, 64, 2, 4, 512, "8 KB a tile: 16 of them in flight"),
    (96, 8): DecodeTile(64, 4, 32, 2, 3, 512, "10 or 12 KB a tile: 12 of them in flight"),
    (128, 8): DecodeTile(64, 4, 32, 2, 3, 512, "16 KB a tile: 12 of them in flight"),
    (256, 8): DecodeTile(64, 3, 32, 2, 1, 512, "32 KB a tile: one block keeps 64 KB in flight"),
}


def decode_tile(head_dim: int, bits: int) -> DecodeTile:
    """The tile for a cache of head_dim numbers of so many bits. Raises ValueError if none fits."""
    for (most_dim, tile_bits), tile in DECODE_TILES.items():
        if head_dim <= most_dim and bits == tile_bits:
            return tile
    raise ValueError(
        f"decode attention on the GPU takes head_dim up to 256, got {head_dim}; "
        "use the reference backend"
    )
