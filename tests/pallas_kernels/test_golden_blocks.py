"""Bytes written by hand, and the weights they stand for worked out by hand, for every format.

A swapped nibble, a wrong plane of high bits or a scale of the neighbouring group gives other
numbers here; the specs are ggml's block types, OCP MX (FP4) and OCP FP8 (e4m3).
"""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import FORMATS, QuantizedArray, check_array, dequantize

HALF_F16, ONE_F16, TWO_F16 = "0038", "003c", "0040"  # little-endian
MINUS_ONE_F16, QUARTER_F16 = "00bc", "0034"
# Byte i of 16: weight i in the low nibble, weight 16 + i in the high one. Codes 0..15, 15..0.
NIBBLES = "f0e1d2c3b4a5968778695a4b3c2d1e0f"
UP_AND_DOWN = [*range(16), *range(15, -1, -1)]
# Weights 0, 15..19 and 31 have the fifth bit; bit i is weight i.
FIFTH_BITS = "01800f80"
FIFTH = [16 if i in (0, 15, 16, 17, 18, 19, 31) else 0 for i in range(32)]


def weights_of_block(name: str, block: bytes) -> list[float]:
    form = FORMATS[name]
    assert len(block) == form.block_bytes
    w = QuantizedArray(
        {"blocks": np.frombuffer(block, np.uint8).reshape(1, -1)}, name, (1, form.block_size)
    )
    check_array(w)
    return np.asarray(dequantize(w))[0].tolist()


@pytest.mark.parametrize(
    ("name", "block", "weights"),
    [
        ("q4_0", HALF_F16 + NIBBLES, [0.5 * (q - 8) for q in UP_AND_DOWN]),
        ("q4_1", TWO_F16 + MINUS_ONE_F16 + NIBBLES, [2.0 * q - 1 for q in UP_AND_DOWN]),
        (
            "q5_0",
            ONE_F16 + FIFTH_BITS + NIBBLES,
            [q + high - 16 for q, high in zip(UP_AND_DOWN, FIFTH, strict=True)],
        ),
        (
            "q5_1",
            QUARTER_F16 + TWO_F16 + FIFTH_BITS + NIBBLES,
            [0.25 * (q + high) + 2 for q, high in zip(UP_AND_DOWN, FIFTH, strict=True)],
        ),
        (
            "q8_0",
            HALF_F16 + "807fff01" + "00" * 27 + "10",
            [-64.0, 63.5, -0.5, 0.5] + [0.0] * 27 + [8.0],
        ),
        # Exponent byte 128: scale 2. Codes 0..7 are 0 .5 1 1.5 2 3 4 6, codes 8..15 less than 0.
        (
            "mxfp4",
            "80" + NIBBLES,
            [
                *(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
                *(-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0),
            ],
        ),
    ],
)
def test_blocks_of_32(name: str, block: str, weights: list[float]) -> None:
    assert weights_of_block(name, bytes.fromhex(block)) == weights


# Scales 1 2 3 63 17 33 50 63 and minima 0 4 63 8 15 16 48 33 of the 8 groups of 32. The last four
# of each keep their high two bits on top of the first four, their low four in the last bytes.
K_SCALES = "4182c3ff" + "0044ff88" + "f101021f"
SCALES, MINIMA = (1, 2, 3, 63, 17, 33, 50, 63), (0, 4, 63, 8, 15, 16, 48, 33)


def k_weights(codes: dict[int, int]) -> list[float]:
    """With d 1 and dmin 1/2; weights that are not named have the code 0."""
    return [float(SCALES[i // 32] * codes.get(i, 0)) - 0.5 * MINIMA[i // 32] for i in range(256)]


def sparse(length: int, values: dict[int, int]) -> bytes:
    return bytes(values.get(i, 0) for i in range(length))


def test_q4_k() -> None:
    """32 bytes hold a group in their low and the next group in their high nibbles."""
    nibbles = sparse(128, {0: 0x21, 31: 0x43, 32: 0x65, 70: 0x87, 127: 0xA9})
    block = bytes.fromhex(ONE_F16 + HALF_F16 + K_SCALES) + nibbles
    codes = {0: 1, 32: 2, 31: 3, 63: 4, 64: 5, 96: 6, 134: 7, 166: 8, 223: 9, 255: 10}
    assert weights_of_block("q4_k", block) == k_weights(codes)


def test_q5_k() -> None:
    """Bit g of high byte i belongs to weight i of group g."""
    high = sparse(32, {0: 0b00000001, 1: 0b10000010, 31: 0b01000000})
    nibbles = sparse(128, {0: 0x21, 31: 0x43, 127: 0xA9})
    block = bytes.fromhex(ONE_F16 + HALF_F16 + K_SCALES) + high + nibbles
    codes = {0: 1 + 16, 32: 2, 31: 3, 63: 4, 223: 9 + 16, 255: 10, 33: 16, 225: 16}
    assert weights_of_block("q5_k", block) == k_weights(codes)


def test_q6_k() -> None:
    """Two halves of 128: 64 bytes of nibbles (low: weights 0..63, high: 64..127) and 32 bytes of
    bit pairs each (bits 2p: weights 32p..). A signed scale per 16 weights. Code 32 is zero."""
    low = sparse(128, {0: 0x21, 33: 0x43, 64: 0x65, 127: 0x87})
    high = sparse(64, {0: 0b11_10_01_00, 1: 0b00_00_00_11, 32: 0b01_00_00_10, 63: 0b11_00_10_00})
    scales = [1, 2, 3, -4, 5, 6, 7, 8, 9, 10, 11, -12, 13, 127, 15, -128]
    block = low + high + np.array(scales, np.int8).tobytes() + bytes.fromhex(HALF_F16)
    codes = {
        0: 1, 64: 2 + 32, 32: 16, 96: 48, 33: 3, 97: 4, 1: 48,
        128: 5 + 32, 192: 6, 224: 16, 191: 7 + 32, 255: 8 + 48,
    }  # fmt: skip
    want = [0.5 * scales[i // 16] * (codes.get(i, 0) - 32) for i in range(256)]
    assert weights_of_block("q6_k", block) == want


def grouped(name: str, codes: np.ndarray, K: int, group: int, **parts: np.ndarray) -> np.ndarray:
    w = QuantizedArray({"codes": codes, **parts}, name, (codes.shape[0], K), group)
    check_array(w)
    return np.asarray(dequantize(w))


def test_int4() -> None:
    """Input 2i is in the low nibble of byte i; a code counts from its group's zero point."""
    codes = np.frombuffer(bytes.fromhex("21f3" + "8097"), np.uint8).reshape(2, 2)
    scales = np.array([[0.5, 2], [1, 0.25]], np.float32)
    zeros = np.array([[1, 15], [8, 7]], np.uint8)
    got = grouped("int4", codes, 4, 2, scales=scales, zeros=zeros)
    assert got.tolist() == [[0.0, 0.5, -24.0, 0.0], [-8.0, 0.0, 0.0, 0.5]]
    plain = grouped("int4", codes, 4, 2, scales=scales)
    assert plain.tolist() == [[0.5, 1.0, 6.0, 30.0], [0.0, 8.0, 1.75, 2.25]]


def test_int8() -> None:
    codes = np.frombuffer(bytes.fromhex("807f00ff"), np.int8).reshape(1, 4)
    scales = np.array([[0.5, 2]], np.float32)
    assert grouped("int8", codes, 4, 2, scales=scales).tolist() == [[-64.0, 63.5, 0.0, -2.0]]
    zeros = np.array([[127, -128]], np.int8)  # a difference needs nine bits
    got = grouped("int8", codes, 4, 2, scales=scales, zeros=zeros)
    assert got.tolist() == [[-127.5, 0.0, 256.0, 254.0]]


def test_fp8() -> None:
    """e4m3: 38 is 1, 7e the largest (448), 01 the smallest (2 ** -9), 80 is -0, 7f no number."""
    codes = np.frombuffer(bytes.fromhex("38b87efe0108807f"), np.uint8).reshape(1, 8)
    scales = np.array([[1, 2]], np.float32)
    got = grouped("fp8", codes, 8, 4, scales=scales)[0]
    assert got[:7].tolist() == [1.0, -1.0, 448.0, -448.0, 2**-8, 2**-5, 0.0]
    assert np.isnan(got[7])


@pytest.mark.parametrize(
    ("name", "dtype", "row"),
    [
        ("f32", np.float32, "0000803f" + "000000c0"),
        ("f16", np.float16, "003c" + "00c0"),
        ("bf16", ml_dtypes.bfloat16, "803f" + "00c0"),
    ],
)
def test_plain_numbers(name: str, dtype: type, row: str) -> None:
    values = np.frombuffer(bytes.fromhex(row), np.uint8).view(dtype).reshape(1, 2)
    w = QuantizedArray({"values": values}, name, (1, 2))
    check_array(w)
    assert np.asarray(dequantize(w)).tolist() == [[1.0, -2.0]]
