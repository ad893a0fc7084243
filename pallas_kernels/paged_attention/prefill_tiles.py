"""Tiles of the Mosaic GPU prefill kernel: chosen by head size and cache width, with the reason.

One thread block fills a multiprocessor: three warpgroups of 168 registers a thread are all it has,
so what counts is that its 227 KB of shared memory hold the queries, and rings deep enough that the
next tile of keys is there when the last is done. Two tiles are: a step of 128 x 128 takes more
than the microsecond that memory takes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillTile:
    """128 query rows against tiles of `keys` keys, a multiple of 64.

    stages: tiles of 16-bit keys, and of values, in the ring, at least 2; staged: 8-bit tiles that
    wait to be dequantised, 0 for 16-bit pages; registers: of a thread of the two compute
    warpgroups, and of the load warpgroup, multiples of 8 of which 2 x compute + load is at most
    504.
    """

    keys: int
    stages: int
    staged: int
    compute_registers: int
    load_registers: int
    reason: str


# (head_dim up to, bits of a cached number): tile. KB: queries + ring (+ staged codes).
PREFILL_TILES: dict[tuple[int, int], PrefillTile] = {
    (64, 16): PrefillTile(128, 3, 0, 232, 40, "16 + 96 KB; short steps, so a deeper ring"),
    (96, 16): PrefillTile(128, 3, 0, 232, 40, "24 + 144 KB at 96"),
    (128, 16): PrefillTile(128, 2, 0, 232, 40, "32 + 128 KB; 64 + 64 registers of sums and scores"),
    (256, 16): PrefillTile(64, 2, 0, 232, 40, "64 + 128 KB; 128 registers of sums leave 32 scores"),
    (64, 8): PrefillTile(128, 2, 2, 192, 120, "16 + 64 + 32 KB; dequantising takes registers"),
    (96, 8): PrefillTile(128, 2, 1, 192, 120, "24 + 112 + 28 KB at 96, values as rows of 128"),
    (128, 8): PrefillTile(
        128, 2, 1, 192, 120, "32 + 128 + 32 KB; a second staged tile is 4 KB over"
    ),
    (256, 8): PrefillTile(64, 2, 1, 208, 88, "64 + 128 + 32 KB; codes go 64 columns at a time"),
}


def prefill_tile(head_dim: int, quantized: bool) -> PrefillTile:
    """The tile for these shapes; ValueError if the kernel does not take them."""
    for (most_dim, bits), tile in PREFILL_TILES.items():
        if head_dim <= most_dim and bits == (8 if quantized else 16):
            return tile
    raise ValueError(
        f"prefill attention on the GPU takes head_dim up to 256, got {head_dim}; "
        "use the reference backend"
    )
