"""The native packed product: right, the same for every row, and not to be fooled.

On every instruction set this machine can be made to use; tests/native runs the same kernels
without XLA, under sanitizers.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.quantized_matmul import (
    FORMATS,
    QuantizedArray,
    StackedRows,
    gated_matmul,
    matmul,
    repack,
    take_rows,
)
from pallas_kernels.quantized_matmul.cases import CASES, Case
from tests.support.packed_arrays import expansion, random_array

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_ROWS = (1, 2, 3, 4, 5, 7, 16, 64)
# Besides cases.py: more than one chain of 256 inputs, and groups that straddle chains.
LONG = (
    Case("f32", 33, 700),
    Case("bf16", 33, 513),
    Case("q4_1", 40, 800),
    Case("q6_k", 33, 768),
    Case("int4", 33, 960, 320, zeros=True),
    Case("int8", 33, 900, 300, zeros=True, perm=True),
    Case("fp8", 33, 900, 300),
)
EXACT = ("f32", "bf16", "f16", "q4_0", "q8_0", "mxfp4", "fp8", "int8")


def on_device(w: QuantizedArray) -> QuantizedArray:
    return jax.device_put(repack(w, "panels"))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def test_the_instruction_set_is_the_one_asked_for() -> None:
    assert native.why_not() is None
    assert native.isa() in (os.environ.get("JAXSERVE_CPU_ISA"), "baseline", "avx2", "avx512")
    assert native.isa() == os.environ.get("JAXSERVE_CPU_ISA", native.isa())


@pytest.mark.parametrize("case", CASES + LONG, ids=lambda case: case.name)
def test_products_and_rows(case: Case) -> None:
    """Against float64 on the expansion; a row's bits are its own, wherever it stands."""
    w = random_array(case)
    panels = on_device(w)
    x = normal(64, case.K)
    last = [x[64 - m :] for m in NUM_ROWS]

    @jax.jit
    def run(x: jax.Array, last: list[jax.Array], w: QuantizedArray) -> tuple[Any, ...]:
        heads = [matmul(x[:m], w) for m in NUM_ROWS]
        return heads, [matmul(some, w) for some in last], take_rows(w, jnp.arange(case.N))

    heads, tails, taken = run(x, last, panels)
    want = expansion(w)
    all_rows = np.asarray(heads[-1])
    bound = 1e-6 * (np.abs(x) @ np.abs(want).T)
    assert (np.abs(all_rows - x.astype(np.float64) @ want.T) <= bound).all()
    for m, head, tail in zip(NUM_ROWS, heads, tails, strict=True):
        np.testing.assert_array_equal(head, all_rows[:m])
        np.testing.assert_array_equal(tail, all_rows[64 - m :])
    np.testing.assert_allclose(taken, want, rtol=3e-7, atol=1e-7 * np.abs(want).max())


@pytest.mark.parametrize("name", EXACT)
def test_packing_loses_nothing(name: str) -> None:
    """One multiplication or none makes these formats' numbers, so they come out to the bit."""
    form = FORMATS[name]
    group = 32 if form.kind == "grouped" else 0
    w = random_array(Case(name, 70, 2 * max(form.block_size, 48) // 32 * 32, group))
    taken = take_rows(on_device(w), jnp.arange(70))
    np.testing.assert_array_equal(taken, expansion(w).astype(np.float32))


def test_rows_are_clipped_and_may_be_none() -> None:
    w = random_array(Case("q4_1", 33, 64))
    taken = take_rows(on_device(w), jnp.array([-5, 0, 32, 10**6]))
    np.testing.assert_allclose(taken, expansion(w)[[0, 0, 32, 32]], rtol=3e-7, atol=1e-7)
    assert take_rows(on_device(w), jnp.zeros(0, jnp.int32)).shape == (0, 64)


def test_no_activations_and_many_axes() -> None:
    w = random_array(Case("q8_0", 33, 64))
    panels = on_device(w)
    assert matmul(jnp.zeros((0, 64)), panels).shape == (0, 33)
    x = normal(2, 3, 64)
    y = matmul(x, panels)
    assert y.shape == (2, 3, 33)
    np.testing.assert_array_equal(y.reshape(6, 33), matmul(x.reshape(6, 64), panels))


def test_stacked_rows_and_a_column_order() -> None:
    cases = [Case("q4_k", 3, 256), Case("int4", 5, 256, 64, True, True), Case("f16", 1, 256)]
    pieces = [random_array(case, seed) for seed, case in enumerate(cases)]
    w = StackedRows(tuple(on_device(piece) for piece in pieces))
    want = np.concatenate([expansion(piece) for piece in pieces])
    x, rows = normal(4, 256), np.array([8, 0, 2, 3, 7, 100, -1])
    bound = 1e-6 * (np.abs(x) @ np.abs(want).T)
    assert (np.abs(matmul(x, w) - x.astype(np.float64) @ want.T) <= bound).all()
    np.testing.assert_allclose(take_rows(w, rows), want[rows.clip(0, 8)], rtol=1e-6, atol=1e-6)


def test_groups_that_the_kernels_cannot_read() -> None:
    with pytest.raises(ValueError, match="int4 panels need groups of a multiple of 8 inputs"):
        repack(random_array(Case("int4", 2, 24, 12)), "panels")


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"shape": (33, 65)}, "not whole blocks of 32"),
    ({"shape": (33, 96)}, "panels of"),
    ({"shape": (65, 64)}, "panels of"),
    ({"shape": (33, -64)}, "want 1 to"),
    ({"shape": (2**31, 64)}, "want 1 to"),
    ({"group": 32}, "group is 32, want 0"),
    ({"format_name": "q8_0"}, "panels of"),
    ({"format_name": "q4_k"}, "not whole blocks of 256"),
    ({"format_name": "int4"}, "groups of 0 do not divide"),
    ({"format_name": "int4", "group": 4}, "panels of"),
    ({"format_name": "int8", "group": 48}, "groups of 48 do not divide"),
    ({"parts": {}}, "the parts in layout 'panels' are none"),
    ({"parts": {"panels": np.zeros((2, 640), np.int8)}}, "of type int8"),
    ({"parts": {"panels": np.zeros((2, 641), np.uint8)}}, "panels of"),
    ({"parts": {"panels": np.zeros((1, 640), np.uint8)}}, "panels of"),
    ({"parts": {"panels": np.zeros(1280, np.uint8)}}, "panels has the shape"),
]


@pytest.mark.parametrize(("change", "problem"), HOSTILE, ids=str)
def test_panels_that_are_not_what_they_say(change: dict[str, Any], problem: str) -> None:
    """Refused in Python: nothing of this may reach memory that is not the array's."""
    w = replace(repack(random_array(Case("q4_1", 33, 64)), "panels"), **change)
    columns = abs(w.shape[1])
    with pytest.raises(ValueError, match=problem):
        take_rows(w, jnp.arange(3))
    with pytest.raises(ValueError, match=problem if w.shape[1] > 0 else "do not fit"):
        jax.jit(lambda x: matmul(x, w))(jnp.ones((2, columns)))


@pytest.mark.parametrize(
    "attributes",
    [{"k": 96}, {"n": 65}, {"n": 0}, {"format": 10, "group": 0}, {"format": 99}, {"format": 25}],
    ids=str,
)
def test_a_handler_reached_without_python_checks_too(attributes: dict[str, int]) -> None:
    panels = repack(random_array(Case("q4_1", 33, 64)), "panels").parts["panels"]
    values = {"format": 21, "group": 0, "n": 33, "k": 64} | attributes
    call = jax.ffi.ffi_call("jaxserve_matmul", jax.ShapeDtypeStruct((2, 33), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        call(jnp.ones((2, 64)), panels, **{name: np.int64(n) for name, n in values.items()})


def in_a_process(isa: str, *command: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"JAXSERVE_CPU_ISA": isa}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    """Every test above that multiplies, in a process that is made to use `isa`."""
    if isa == native.isa():
        return  # this process has just done so
    chosen = "asked_for or products_and_rows or loses_nothing"
    done = in_a_process(isa, "-m", "pytest", __file__, "-k", chosen, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(CASES + LONG) + len(EXACT) + 1} passed" in done.stdout


def test_an_instruction_set_that_cannot_be_had() -> None:
    code = "from pallas_kernels import native; print(native.why_not())"
    done = in_a_process("avx1024", "-c", code)
    assert done.stdout.strip() == (
        "JAXSERVE_CPU_ISA names no instruction set; choose baseline, avx2 or avx512"
    ), done.stderr


@pytest.mark.parametrize("rows", [1, 3, 6, 17, 200])
@pytest.mark.parametrize("form", ["q4_1", "q6_k", "f32"])
def test_a_sum_and_a_gate_at_the_end_change_no_bit(form: str, rows: int) -> None:
    w = on_device(random_array(Case(form, 192, 512)))
    x, addend = normal(rows, 512), normal(rows, 192)
    plain = matmul(x, w)
    np.testing.assert_array_equal(matmul(x, w, jnp.asarray(addend)), addend + plain)
    np.testing.assert_array_equal(
        gated_matmul(x, w, "silu"), gated_activation(plain, "silu", backend="cpu")
    )


@pytest.mark.parametrize("case", [Case("q4_1", 96, 64), Case("f32", 34, 64)])
def test_halves_that_are_not_whole_panels_are_gated_too(case: Case) -> None:
    w = random_array(case)
    x = normal(5, 64)
    want = gated_activation(matmul(x, jax.device_put(w)), "gelu_pytorch_tanh")
    packed = on_device(w)
    stacked = StackedRows((packed, on_device(random_array(case, seed=1))))
    np.testing.assert_allclose(gated_matmul(x, packed, "gelu_pytorch_tanh"), want, 1e-4, 1e-4)
    both = matmul(x, stacked)
    np.testing.assert_array_equal(
        gated_matmul(x, stacked, "silu"), gated_activation(both, "silu", backend="cpu")
    )
    np.testing.assert_array_equal(matmul(x, stacked, both), both + both)


def test_an_addend_of_another_shape_or_type_is_refused() -> None:
    w = on_device(random_array(Case("q4_1", 64, 64)))
    with pytest.raises(ValueError, match=r"float32 \[..., 64\], got float32 \(3, 63\)"):
        matmul(normal(3, 64), w, jnp.zeros((3, 63)))
    with pytest.raises(ValueError, match="got bfloat16"):
        matmul(normal(3, 64), w, jnp.zeros((3, 64), jnp.bfloat16))
