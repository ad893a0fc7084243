"""Named shapes of latent attention, for tests and benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows: (query_len, kv_len) of each decode row, then of each prefill row; 0, 0 is padding.

    kv names the cache: bf16, int8 or fp8 (float8_e4m3fn). splits None: the tile table's choice.
    """

    name: str
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...] = ()
    width: int = 1
    pad_tokens: int = 0
    num_heads: int = 16
    value_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    kv: str = "bf16"
    splits: int | None = None


CASES = (
    Case("decode-ragged", ((1, 63), (1, 64), (1, 65), (0, 0), (1, 1)), splits=1),
    Case("decode-splits-3", ((1, 999), (1, 7), (0, 0)), splits=3),
    Case("decode-h128", ((1, 130),), num_heads=128, splits=2),
    Case("decode-page128", ((1, 129), (1, 200)), page_size=128, splits=2),
    Case("verify", ((3, 140), (8, 8), (0, 0)), width=8, splits=2),
    Case("prefill", (), ((13, 74), (0, 0), (1, 129), (18, 18)), pad_tokens=5),
    Case("mixed-h40-page16", ((1, 33), (0, 0)), ((9, 61),), 1, 2, 40, page_size=16, splits=2),
    Case("rank256", ((1, 100),), num_heads=40, value_dim=256, rope_dim=32, splits=2),
    Case("int8", ((1, 130), (1, 7)), ((7, 70), (4, 4)), kv="int8", page_size=32, splits=2),
    Case("fp8-verify", ((4, 100),), width=4, kv="fp8", page_size=16, splits=2),
    Case("fp8-prefill", (), ((4, 70),), kv="fp8", num_heads=64),
)

# What DeepSeek-V2-Lite, MiniCPM3, Kimi-K2 and DeepSeek-V3 ask for on one or several GPUs.
HEAD_COUNTS = (16, 32, 40, 64, 128)
