"""The arithmetic of a plan, against figures that are known."""

import pytest

from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.planning import figures
from jaxserve.planning.devices import DEVICE_NAMES, GPUS, find_gpu
from jaxserve.planning.roofline import decode_step, kv_bytes, prefill_rate

LLAMA_2_13B_BYTES = 26_000_000_000  # 13.0e9 parameters in bfloat16


def llama_2_13b(num_kv_heads: int) -> KVSpec:
    return KVSpec((KVGroup("global", tuple(range(40)), num_kv_heads, 128),))


@pytest.mark.parametrize(
    ("num_kv_heads", "batch", "printed"),
    [
        (40, 1, ("26.84 GB", "8.0 ms", "125")),
        (40, 64, ("79.69 GB", "23.8 ms", "2,691")),
        (8, 1, ("26.17 GB", "7.8 ms", "128")),
        (8, 64, ("36.74 GB", "11.0 ms", "5,836")),
    ],
)
def test_llama_2_13b_on_an_h100(num_kv_heads, batch, printed):
    h100 = find_gpu("h100")
    step = decode_step(
        batch,
        LLAMA_2_13B_BYTES,
        kv_bytes(llama_2_13b(num_kv_heads), 1024, 2),
        h100.bandwidth,
        operations_per_token=2 * 13 * 10**9,
        matrix_rate=h100.rates["bfloat16"],
    )
    assert step.bound == "memory"
    shown = (
        figures.size(step.read_bytes),
        figures.milliseconds(step.seconds),
        figures.rate(step.tokens_per_second),
    )
    assert shown == printed


def test_llama_2_7b_keeps_two_gib_for_a_sequence_of_4096():
    spec = KVSpec((KVGroup("global", tuple(range(32)), 32, 128),))
    assert kv_bytes(spec, 4096, 2) == 2_147_483_648


def test_windowed_layers_keep_their_window():
    spec = KVSpec((KVGroup("global", (0,), 1, 64), KVGroup("windowed", (1, 2), 1, 64, 512)))
    per_token = 2 * 64 * 2
    assert kv_bytes(spec, 100, 2) == 3 * 100 * per_token
    assert kv_bytes(spec, 4096, 2) == (4096 + 2 * 512) * per_token
    assert kv_bytes(spec, 100, 2) == 100 * spec.bytes_per_token(2)


def test_int8_kv_counts_its_scales():
    spec = llama_2_13b(8)
    assert kv_bytes(spec, 7, 1) == 7 * spec.bytes_per_token(1) == 7 * 2 * 40 * 8 * (128 + 4)


def test_a_large_batch_is_bound_by_computing():
    step = decode_step(1000, 10**9, 0, 1e12, operations_per_token=2 * 10**9, matrix_rate=1e14)
    assert (step.bound, step.seconds) == ("compute", pytest.approx(0.02))
    assert step.tokens_per_second == pytest.approx(50_000)


def test_what_is_not_known_stays_unknown():
    step = decode_step(4, 10**9, 10**6, None, operations_per_token=1, matrix_rate=None)
    assert (step.seconds, step.tokens_per_second) == (None, None)
    assert prefill_rate(26 * 10**9, None) is None
    assert (figures.milliseconds(None), figures.rate(None)) == ("?", "?")


def test_prefill_is_the_matrix_rate_over_the_operations_of_a_token():
    assert figures.rate(prefill_rate(2 * 13 * 10**9, 989.5e12)) == "38,058"


def test_every_device_names_its_source_and_its_rates():
    for device in GPUS.values():
        assert "data sheet" in device.source
        assert device.memory
        assert device.bandwidth
        assert device.rates["bfloat16"] > device.rates["float32"]
    assert DEVICE_NAMES == ("h200", "h100", "a100", "l4", "cpu")
    with pytest.raises(ValueError, match="device is 'tpu'; choose h200, h100, a100, l4, cpu"):
        find_gpu("tpu")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (999_996, "1.00 MB"),
     (26_838_860_800, "26.84 GB"), (4.8e12, "4.80 TB")],
)  # fmt: skip
def test_sizes_are_written_in_powers_of_1000(value, text):
    assert figures.size(value) == text
