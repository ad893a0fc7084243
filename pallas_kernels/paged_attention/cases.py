"""Named shapes of paged attention, for tests and benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows: (query_len, kv_len) of each decode row, then of each prefill row; 0, 0 is padding."""

    name: str
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...] = ()
    width: int = 1
    pad_tokens: int = 0
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tree: bool = False


CASES = (
    Case("decode-1", ((1, 37),)),
    Case("decode-ragged", ((1, 1), (1, 16), (1, 17), (1, 300), (0, 0))),
    Case("decode-mha-head80", ((1, 5), (1, 129)), num_heads=2, num_kv_heads=2, head_dim=80),
    Case("decode-window", ((1, 300), (1, 7), (0, 0), (1, 129)), window=64),
    Case("decode-window-1", ((1, 200), (1, 1)), window=1),
    Case("decode-softcap", ((1, 140), (1, 9)), softcap=2.0),
    Case("decode-sinks", ((1, 140), (1, 9)), sinks=True),
    Case("decode-page7", ((1, 140), (1, 9)), page_size=7),
    Case("decode-page256", ((1, 300), (1, 9)), page_size=256),
    Case("verify", ((3, 40), (5, 5), (1, 200), (0, 0)), width=5),
    Case("verify-window-sinks", ((3, 40), (5, 150)), width=5, window=20, sinks=True),
    Case("verify-tree", ((5, 40), (5, 133), (2, 9)), width=5, tree=True),
    Case("prefill-whole", (), ((130, 130),)),
    Case("prefill-chunk", (), ((64, 200), (7, 7), (1, 129)), pad_tokens=9),
    Case("prefill-window", (), ((70, 300), (64, 64)), window=33, pad_tokens=3),
    Case("prefill-sinks-softcap", (), ((70, 90),), sinks=True, softcap=3.0),
    Case("mixed", ((1, 33), (0, 0), (1, 257)), ((65, 65), (0, 0), (3, 140)), pad_tokens=28),
    Case("mixed-gqa9", ((1, 33),), ((20, 30),), num_heads=9, num_kv_heads=3, head_dim=64),
)

# Shapes that divide no tile, block, page or vector.
ODD_CASES = (
    Case("odd-head5", ((1, 1), (1, 70)), ((33, 97),), num_heads=3, num_kv_heads=1, head_dim=5),
    Case("odd-head20", ((1, 65),), ((19, 84),), num_heads=14, num_kv_heads=2, head_dim=20),
    Case("odd-head36", ((1, 130),), ((7, 7),), num_heads=1, num_kv_heads=1, head_dim=36),
    Case("odd-page3", ((2, 67), (1, 3)), ((40, 40),), width=3, page_size=3, window=50),
    Case("head96-g5", ((1, 200),), ((70, 200),), num_heads=5, num_kv_heads=1, head_dim=96),
    Case("head128-g4", ((1, 200),), ((70, 129),), num_heads=8, num_kv_heads=2, head_dim=128),
    Case("head256-g4-window", ((1, 600),), ((30, 600),), head_dim=256, num_kv_heads=1, window=512),
    Case("many-heads", ((1, 66),), ((3, 66),), num_heads=100, num_kv_heads=1, head_dim=8),
    Case("long", ((1, 1500), (1, 640)), ((9, 1000),), num_heads=9, num_kv_heads=3, head_dim=64),
    Case("tree-window", ((5, 140), (4, 66)), width=5, window=30, tree=True, sinks=True),
)


@dataclass(frozen=True)
class PoolCase(Case):
    """A case on the GPU's pool. cache: bf16, int8 or fp8; splits: of a decode row's keys."""

    cache: str = "bf16"
    splits: int = 1


# Chosen so that every value of an axis meets every value of most others: head_dim 64 to 256, query
# heads per KV head 1 to 16, pages 16 to 128, the cache, lengths around a tile of 64, and options.
GPU_DECODE_CASES = (
    PoolCase("d64-g1", ((1, 1), (1, 63)), head_dim=64, num_heads=2),
    PoolCase(
        "d64-g8-verify", ((1, 65), (7, 130)), width=8, head_dim=64, num_heads=8, num_kv_heads=1,
        page_size=64, cache="int8", window=100, sinks=True,
    ),
    PoolCase(
        "d64-g16-long", ((1, 999), (0, 0)), head_dim=64, num_heads=16, num_kv_heads=1,
        page_size=128, cache="fp8", softcap=30.0, splits=3,
    ),
    PoolCase(
        "d64-g5-tree", ((3, 70), (2, 2)), width=3, head_dim=64, num_heads=5, num_kv_heads=1,
        page_size=32, softcap=3.0, sinks=True, tree=True,
    ),
    PoolCase(
        "d80-g1-window-1", ((1, 64), (1, 65)), head_dim=80, num_heads=2, cache="fp8", window=1,
        sinks=True,
    ),
    PoolCase(
        "d80-g4-verify", ((2, 130), (1, 1)), width=2, head_dim=80, num_heads=4, num_kv_heads=1,
        page_size=64, softcap=30.0, splits=3,
    ),
    PoolCase(
        "d80-g7", ((1, 63), (0, 0)), head_dim=80, num_heads=7, num_kv_heads=1, page_size=32,
        cache="int8",
    ),
    PoolCase(
        "d96-g5-tree", ((4, 66), (1, 9)), width=4, head_dim=96, num_heads=5, num_kv_heads=1,
        cache="int8", tree=True, splits=3,
    ),
    PoolCase(
        "d96-g16-long", ((1, 999), (1, 1)), head_dim=96, num_heads=16, num_kv_heads=1,
        page_size=64, window=700, splits=3,
    ),
    PoolCase(
        "d96-g1", ((1, 65), (1, 63)), head_dim=96, num_heads=1, num_kv_heads=1, page_size=128,
        cache="fp8", softcap=30.0, sinks=True,
    ),
    PoolCase("d128-g4", ((1, 200), (1, 1), (0, 0)), head_dim=128, num_heads=8, page_size=64),
    PoolCase(
        "d128-g8-verify", ((7, 150), (1, 65)), width=8, head_dim=128, num_heads=8, num_kv_heads=1,
        cache="fp8", window=100,
    ),
    PoolCase(
        "d128-g7", ((1, 65), (1, 64)), head_dim=128, num_heads=7, num_kv_heads=1, window=1,
        sinks=True,
    ),
    PoolCase(
        "d128-g4-long", ((1, 63), (1, 999)), head_dim=128, num_heads=4, num_kv_heads=1,
        page_size=32, cache="int8", sinks=True, splits=3,
    ),
    PoolCase(
        "d128-g16-verify-tree", ((8, 65),), width=8, head_dim=128, num_heads=16, num_kv_heads=1,
        page_size=64, tree=True,
    ),
    PoolCase(
        "d256-g4", ((1, 130), (1, 1)), head_dim=256, num_heads=4, num_kv_heads=1, window=100,
        splits=3,
    ),
    PoolCase(
        "d256-g16-verify", ((8, 70),), width=8, head_dim=256, num_heads=16, num_kv_heads=1,
        page_size=64, cache="int8", softcap=30.0, sinks=True,
    ),
    PoolCase(
        "d256-g5", ((1, 64), (1, 63)), head_dim=256, num_heads=5, num_kv_heads=1, page_size=128,
        cache="fp8",
    ),
)  # fmt: skip

# Tiles of the prefill kernel are 128 rows (tokens times heads of a group) and 128 or 64 keys:
# chunks with and without a prefix, one-token rows, empty rows, padding, rows that begin at no
# multiple of 8, and one row whose two warpgroups see different keys.
GPU_PREFILL_CASES = (
    PoolCase(
        "prefix-g4", (), ((70, 131),), num_heads=4, num_kv_heads=1, head_dim=64, pad_tokens=10
    ),
    PoolCase(
        "rows-g1", (), ((1, 1), (0, 0), (7, 64), (3, 65)), num_kv_heads=4, head_dim=80,
        page_size=64, cache="int8",
    ),
    PoolCase(
        "halves-g1", (), ((140, 190),), num_heads=1, num_kv_heads=1, head_dim=64, page_size=64,
        window=100, softcap=30.0,
    ),
    PoolCase(
        "long-g5", (), ((20, 999),), num_heads=5, num_kv_heads=1, head_dim=96, page_size=32,
        sinks=True, cache="fp8",
    ),
    PoolCase(
        "window-g8", (), ((33, 300), (5, 300)), num_heads=8, num_kv_heads=1, head_dim=128,
        page_size=128, window=100, cache="int8",
    ),
    PoolCase(
        "softcap-g7", (), ((17, 65),), num_heads=7, num_kv_heads=1, head_dim=256, page_size=64,
        softcap=30.0, pad_tokens=3,
    ),
    PoolCase(
        "window1-g16", (), ((9, 63), (0, 0), (5, 64)), num_heads=16, num_kv_heads=1, head_dim=128,
        window=1, sinks=True, cache="fp8",
    ),
    PoolCase(
        "wide-page", (), ((11, 200),), num_heads=2, num_kv_heads=2, head_dim=256, page_size=128,
        window=64, cache="int8",
    ),
    PoolCase(
        "small-page-g4", (), ((37, 150),), num_kv_heads=1, head_dim=80, window=100, sinks=True,
        cache="fp8",
    ),
    PoolCase(
        "plain-g4", (), ((9, 70), (60, 140)), num_heads=4, num_kv_heads=1, head_dim=128,
        page_size=64, pad_tokens=27,
    ),
    PoolCase("bits-int8", (), ((13, 90), (6, 20)), num_heads=2, num_kv_heads=1, head_dim=64,
             window=30, pad_tokens=5, cache="int8"),
    PoolCase("bits-bf16", (), ((13, 90), (6, 20)), num_heads=2, num_kv_heads=1, head_dim=96,
             window=30, pad_tokens=5),
)  # fmt: skip
