"""The reference of packed products says what the gguf package and the formulas say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import (
    FORMATS,
    QuantizedArray,
    StackedRows,
    check_array,
    dequantize,
    matmul,
    repack,
    take_rows,
)
from pallas_kernels.quantized_matmul.cases import CASES, Case
from tests.support.packed_arrays import expansion, random_array

BLOCKS = [form.name for form in FORMATS.values() if form.kind == "blocks"]
TINY = np.finfo(np.float32).tiny  # below it, a machine may flush to zero
# The largest error of a number quantised by the gguf package, as a part of the block's peak.
STEPS = {
    "q4_0": 1 / 8, "q4_1": 1 / 15, "q5_0": 1 / 16, "q5_1": 1 / 31, "q8_0": 0.5 / 127,
    "mxfp4": 1 / 4,
}  # fmt: skip


def test_every_format_has_cases() -> None:
    assert {case.format_name for case in CASES} == set(FORMATS)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled(case: Case) -> None:
    """Expansion, products and rows, as the engine runs them: compiled, on arguments."""
    w = random_array(case)
    check_array(w)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 2, case.K)).astype(np.float32)
    rows = np.array([case.N - 1, 0, 0, case.N // 2, 10**6, -5], np.int32)

    @jax.jit
    def run(w: QuantizedArray, x: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        return dequantize(w), matmul(x, w), take_rows(w, rows)

    weights, products, taken = run(jax.device_put(w), x, rows)
    want = expansion(w)
    assert weights.dtype == products.dtype == taken.dtype == jnp.float32
    close = {"rtol": 3e-7, "atol": 1e-7 * np.abs(want).max()}
    np.testing.assert_allclose(weights, want, **close)
    np.testing.assert_allclose(taken, want[rows.clip(0, case.N - 1)], **close)
    bound = 1e-6 * (np.abs(x) @ np.abs(want).T)
    assert (np.abs(products - x.astype(np.float64) @ want.T) <= bound).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_any_bytes_are_the_float32_numbers_of_the_gguf_package(name: str) -> None:
    """Outside jit, every operation is the package's. Also with infinite and undefined scales."""
    form = FORMATS[name]
    blocks = np.random.default_rng(7).integers(0, 256, (500, 2 * form.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])
    w = QuantizedArray({"blocks": blocks}, name, want.shape)
    flushed = np.where(np.abs(want) < TINY, 0, want)
    got = np.asarray(dequantize(w))
    np.testing.assert_array_equal(np.where(np.abs(want) < TINY, 0, got), flushed)


def test_mxfp4_of_every_exponent() -> None:
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    with np.errstate(over="ignore"):
        want = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    got = np.asarray(dequantize(QuantizedArray({"blocks": blocks}, "mxfp4", (256, 32))))
    normal = np.abs(want) >= TINY
    assert normal[0, 7]  # the largest code, though its scale alone is below the normal numbers
    np.testing.assert_array_equal(got[normal], want[normal])
    assert (np.abs(got[~normal]) < TINY).all()


def test_fp8_of_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    w = QuantizedArray(
        {"codes": codes, "scales": np.ones((1, 1), np.float32)}, "fp8", (1, 256), 256
    )
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(dequantize(w), want)


@pytest.mark.parametrize("name", STEPS)
def test_numbers_that_were_quantised_come_back_close(name: str) -> None:
    values = np.random.default_rng(8).normal(size=(5, 96)).astype(np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    got = dequantize(QuantizedArray({"blocks": blocks}, name, values.shape))
    peak = np.abs(values.reshape(-1, 32)).max(axis=1).repeat(32).reshape(values.shape)
    assert (np.abs(got - values) <= 1.001 * (STEPS[name] + 2**-10) * peak).all()


def stacked() -> StackedRows:
    cases = [
        Case("q4_k", 3, 256), Case("int4", 5, 256, 64, zeros=True, perm=True), Case("f16", 1, 256),
    ]  # fmt: skip
    return StackedRows(tuple(random_array(case, seed) for seed, case in enumerate(cases)))


def test_stacked_rows_are_one_matrix() -> None:
    w = stacked()
    want = np.concatenate([expansion(piece) for piece in w.pieces])
    assert w.shape == want.shape == (9, 256)
    x = np.random.default_rng(2).normal(size=(4, 256)).astype(np.float32)
    rows = np.array([8, 0, 2, 3, 7, 100, -1])
    run = jax.jit(lambda w, x, rows: (dequantize(w), matmul(x, w), take_rows(w, rows)))
    weights, products, taken = run(w, x, rows)
    np.testing.assert_allclose(weights, want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(products, x @ want.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taken, want[rows.clip(0, 8)], rtol=1e-6, atol=1e-8)


def test_a_permutation_is_undone() -> None:
    """Column j as kept multiplies input perm[j]."""
    values = np.arange(6, dtype=np.int8).reshape(2, 3)
    parts = {
        "codes": values,
        "scales": np.ones((2, 1), np.float32),
        "perm": np.array([2, 0, 1], np.int32),
    }
    w = QuantizedArray(parts, "int8", (2, 3), 3)
    np.testing.assert_array_equal(dequantize(w), [[1, 2, 0], [4, 5, 3]])
    np.testing.assert_array_equal(matmul(jnp.eye(3), w), [[1, 4], [2, 5], [0, 3]])


@pytest.mark.parametrize("group", [1, 3, 5])
def test_int4_groups_of_odd_sizes(group: int) -> None:
    """A byte may hold codes of two groups."""
    w = random_array(Case("int4", 2, 4 * group, group, zeros=True))
    check_array(w)
    np.testing.assert_allclose(jax.jit(dequantize)(w), expansion(w), rtol=3e-7)


def test_the_reference_refuses_another_layout() -> None:
    w = replace(random_array(Case("q4_0", 2, 32)), layout="panels")
    with pytest.raises(ValueError, match="'rows', got 'panels'"):
        dequantize(w)
    with pytest.raises(ValueError, match="only the layout 'rows' can be repacked, got 'panels'"):
        repack(replace(w, parts={"panels": np.zeros((1, 576), np.uint8)}), "rows")
    with pytest.raises(ValueError, match=r"activations \(1, 33\) do not fit a matrix \(2, 32\)"):
        matmul(jnp.ones((1, 33)), replace(w, layout="rows"))


Change = Callable[[QuantizedArray], QuantizedArray]


def part(name: str, value: Any) -> Change:
    return lambda w: replace(w, parts={**w.parts, name: value})


def without(name: str) -> Change:
    return lambda w: replace(w, parts={n: p for n, p in w.parts.items() if n != name})


def field(**changes: Any) -> Change:
    return lambda w: replace(w, **changes)


REFUSALS: list[tuple[Case, Change, str]] = [
    (Case("q4_0", 2, 64), field(format_name="q9_9"), "format is 'q9_9'; choose f32, bf16"),
    (Case("q4_0", 2, 64), field(layout="tiles"), "layout is 'tiles'; choose rows, panels"),
    (Case("q4_0", 2, 64), field(shape=(2, 65)), "65 inputs are not whole blocks of 32"),
    (Case("q4_0", 2, 64), field(shape=(0, 64)), r"\(0, 64\): want 1 to 2147483647 rows"),
    (Case("q4_0", 2, 64), field(shape=(2, -64)), "want 1 to 2147483647 rows and inputs"),
    (Case("q4_0", 2, 64), field(shape=(2**31, 64)), "want 1 to 2147483647 rows and inputs"),
    (Case("q4_0", 2, 64), field(shape=(2.0, 64)), "want a shape of two integers"),
    (Case("q4_0", 2, 64), field(shape=(True, 64)), "want a shape of two integers"),
    (Case("q4_0", 2, 64), field(shape=(2, 64, 1)), "want a shape of two integers"),
    (Case("q4_0", 2, 64), field(shape=[2, 64]), "want a shape of two integers"),
    (Case("q4_0", 2, 64), field(shape=(3, 64)), r"blocks has the shape \[2, 36\], want \[3, 36\]"),
    (Case("q4_0", 2, 64), field(shape=(2, 2**31 - 32)), r"blocks has the shape \[2, 36\], want"),
    (Case("q4_0", 2, 64), field(group=32), "group is 32, want 0"),
    (Case("q4_0", 2, 64), without("blocks"), "the parts in layout 'rows' are none; want blocks"),
    (Case("q4_0", 2, 64), part("scales", np.ones(1)), "are blocks, scales; want blocks, perhaps"),
    (Case("q4_0", 2, 64), part("blocks", np.zeros((2, 36), np.int8)), "int8, want uint8"),
    (Case("q4_0", 2, 64), part("blocks", np.zeros((2, 36, 1), np.uint8)), "blocks has the shape"),
    (Case("q4_0", 2, 64), part("blocks", b"xx"), "blocks is of type None, want uint8"),
    (Case("f16", 2, 3), part("values", np.zeros((2, 3), np.float32)), "float32, want float16"),
    (Case("bf16", 2, 3), part("values", np.zeros((2, 3), np.uint16)), "uint16, want bfloat16"),
    (Case("f32", 2, 3), part("zeros", np.zeros((2, 1), np.int8)), "are values, zeros; want values"),
    (Case("int4", 2, 64, 32), field(group=0), "groups of 0 do not divide 64 inputs"),
    (Case("int4", 2, 64, 32), field(group=-32), "groups of -32 do not divide 64"),
    (Case("int4", 2, 64, 32), field(group=33), "groups of 33 do not divide 64 inputs"),
    (Case("int4", 2, 64, 32), field(group=128), "groups of 128 do not divide 64 inputs"),
    (Case("int4", 2, 64, 32), field(group=32.0), "group is '32.0', want an integer"),
    (Case("int4", 2, 64, 32), field(group=64), r"scales has the shape \[2, 2\], want \[2, 1\]"),
    (Case("int4", 2, 64, 32), field(shape=(2, 33), group=33), "do not fill bytes of two codes"),
    (Case("int4", 2, 64, 32), without("scales"), "are codes; want codes, scales, perhaps perm, z"),
    (Case("int4", 2, 64, 32), part("scales", np.ones((2, 2))), "scales is of type float64"),
    (Case("int4", 2, 64, 32), part("zeros", np.ones((2, 2), np.int8)), "zeros is of type int8"),
    (Case("int8", 2, 64, 32), part("zeros", np.ones((2, 2), np.uint8)), "zeros is of type uint8"),
    (Case("fp8", 2, 64, 32), part("zeros", np.ones((2, 2), np.uint8)), "are codes, scales, zeros"),
    (Case("int8", 2, 3, 3), part("perm", np.array([0, 1], np.int32)), r"perm has the shape \[2\]"),
    (Case("int8", 2, 3, 3), part("perm", np.array([0, 1, 2])), "perm is of type int64, want int32"),
    (Case("int8", 2, 3, 3), part("perm", np.array([0, 1, 3], np.int32)), "perm is not an order of"),
    (Case("int8", 2, 3, 3), part("perm", np.array([0, 1, -1], np.int32)), "perm is not an order"),
    (Case("int8", 2, 3, 3), part("perm", np.array([0, 1, 1], np.int32)), "inputs 0 to 2"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "problem"), REFUSALS, ids=lambda value: str(value)[:40])
def test_arrays_that_are_not_what_they_say(case: Case, change: Change, problem: str) -> None:
    w = random_array(case)
    check_array(w)
    with pytest.raises(ValueError, match=problem) as caught:
        check_array(change(w))
    assert len(str(caught.value)) < 300


def test_checks_of_panels_and_of_traced_arrays() -> None:
    panels = QuantizedArray(
        {"panels": np.zeros((1, 640), np.uint8)}, "q4_1", (3, 64), layout="panels"
    )
    check_array(panels)
    check_array(part("perm", np.arange(64, dtype=np.int32)[::-1])(panels))
    for change, problem in (
        (
            part("panels", np.zeros(640, np.uint8)),
            r"panels has the shape \[640\], want \[any, any\]",
        ),
        (part("panels", np.zeros((1, 640), np.int8)), "panels is of type int8"),
        (part("blocks", np.zeros((1, 640), np.uint8)), "are blocks, panels; want panels"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_array(change(panels))
    with pytest.raises(ValueError, match="want a QuantizedArray, got StackedRows"):
        check_array(stacked())  # type: ignore[arg-type]

    def checked(w: QuantizedArray) -> jax.Array:
        check_array(w)
        return dequantize(w)

    w = random_array(Case("int8", 2, 6, 3, perm=True))
    np.testing.assert_allclose(jax.jit(checked)(w), expansion(w), rtol=3e-7)
