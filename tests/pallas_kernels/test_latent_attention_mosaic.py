"""Latent attention's kernel: against the float64 formula, in interpretation with race detection;
what may not change a bit, what it reads, and that it compiles for Hopper without spills."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.latent_attention.cases import CASES, HEAD_COUNTS, Case
from pallas_kernels.latent_attention.mosaic_gpu import latent_attention_mosaic
from pallas_kernels.latent_attention.tiles import TILES, pick_splits
from tests.support.latent_inputs import make_inputs, oracle, softmax_scale
from tests.support.sm90a import compile_sm90a, lower_cuda

pytestmark = pytest.mark.interpreted

BITS = Case("bits", ((1, 70), (0, 0)), ((3, 5),), pad_tokens=1, splits=2)


def call(case: Case, **options):
    """The kernel as a function of the case's arrays."""

    def attend(arrays: dict) -> jax.Array:
        return latent_attention_mosaic(
            **arrays,
            decode_rows=len(case.decode),
            width=case.width,
            scale=softmax_scale(case),
            value_dim=case.value_dim,
            splits=case.splits,
            **options,
        )

    return attend


def arrays_of(inputs: dict) -> dict:
    return {name: None if x is None else jnp.asarray(x) for name, x in inputs.items()}


def run(case: Case, inputs: dict) -> np.ndarray:
    return np.asarray(call(case, interpret=True)(arrays_of(inputs)).astype(jnp.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_matches_the_formula(case: Case):
    inputs = make_inputs(case)
    got, want = run(case, inputs), oracle(case, inputs)
    error = np.abs(got - want)
    rms = np.sqrt((want[want != 0] ** 2).mean())
    # A large output is rounded to bfloat16 by more than the sums are off.
    assert np.all(error < 2e-2 * rms + np.abs(want) / 256)
    assert error.mean() < 2e-3 * rms
    assert np.all(got[want == 0] == 0)


def test_what_others_hold_changes_no_bit():
    """Free pages, slots past the end, the other rows and where the pages lie."""
    inputs = make_inputs(BITS)
    before = run(BITS, inputs)
    others = {k: None if v is None else v.copy() for k, v in inputs.items()}
    pages = others["latent_pages"]
    pages[np.isnan(pages.astype(np.float32))] = 3
    order = np.random.default_rng(1).permutation(pages.shape[1])
    moved = np.empty_like(pages)
    moved[:, order] = pages
    others["latent_pages"] = moved
    others["page_table"] = order[others["page_table"]].astype(np.int32)
    others["q"][-1] = np.nan  # padding
    np.testing.assert_array_equal(run(BITS, others), before)
    # The prefill row's numbers are its own: NaN there leaves the decode row as it was.
    others["latent_pages"][:, others["page_table"][2, 0]] = np.nan
    others["q"][2:] = np.nan
    np.testing.assert_array_equal(run(BITS, others)[:2], before[:2])


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_reads_nothing_twice(kv: str):
    case = Case("bytes", ((1, 250), (1, 190)), num_heads=64, kv=kv, splits=1)
    inputs = make_inputs(case)
    with mgpu.counting_bytes() as moved:
        run(case, inputs)
    token = 576 * inputs["latent_pages"].dtype.itemsize + (8 if kv == "int8" else 0)
    least = (250 + 190) * token + 2 * 64 * 576 * 2
    assert least <= moved.total <= 1.1 * least


def test_every_number_of_blocks_has_a_row_with_a_reason():
    assert pick_splits(1, 128 * 1024) == 16
    assert pick_splits(1, 600) == 2
    assert pick_splits(64, 8192) == 2
    assert pick_splits(1000, 8192) == 1
    assert all(row.reason for row in TILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 12}, "multiple of 8 heads"),
        ({"value_dim": 192}, "of 128 and of 32"),
        ({"page_size": 8}, "want 16, 32, 64 or 128"),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_refused(change: dict, message: str):
    case = replace(BITS, **change)
    with pytest.raises(ValueError, match=message):
        call(case)(arrays_of(make_inputs(case)))


def test_float32_queries_are_refused():
    arrays = arrays_of(make_inputs(BITS))
    arrays["q"] = arrays["q"].astype(jnp.float32)
    with pytest.raises(ValueError, match="want bfloat16 queries"):
        call(BITS)(arrays)


@pytest.mark.parametrize("case", CASES[-5:], ids=lambda c: c.name)
def test_lowers_for_cuda(case: Case):
    assert "mosaic_gpu" in lower_cuda(call(case), arrays_of(make_inputs(case))).as_text()


@pytest.mark.sm90a
@pytest.mark.parametrize(
    ("kv", "heads"), [("bf16", 16), ("bf16", 128), ("int8", 40), ("int8", 64), ("fp8", 16)]
)
def test_compiles_for_hopper(kv: str, heads: int):
    """Two kernels: split decode rows, and prefill rows that write their output themselves."""
    assert heads in HEAD_COUNTS
    page_size = 16 if heads == 40 else 64
    case = Case("", ((1, 9),), ((3, 9),), num_heads=heads, kv=kv, page_size=page_size, splits=2)
    report = compile_sm90a(call(case), arrays_of(make_inputs(case)))
    assert len(report.kernels) == 2
    for kernel in report.kernels:
        assert kernel.shared_memory <= mgpu.SHARED_MEMORY_BYTES
