"""The layout of the GPU kernels: nothing is lost, little is added, the rest is refused."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import (
    QuantizedArray,
    dequantize,
    matmul,
    repack,
    repack_shape,
    take_rows,
)
from pallas_kernels.quantized_matmul.cases import CASES, Case
from pallas_kernels.quantized_matmul.gpu_layout import expand_gpu
from pallas_kernels.quantized_matmul.tiles import TABLE, Tiles, choose_splits, choose_tiles
from tests.support.packed_arrays import random_array


def is_kept(case: Case) -> bool:
    return case.format_name != "mxfp4" and case.group != 96


KEPT = [case for case in CASES if is_kept(case)]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_repacking_loses_nothing(case: Case) -> None:
    """Bit for bit, rows taken one by one too."""
    w = random_array(case)
    packed = repack(w, "gpu")
    whole = np.asarray(dequantize(w))
    in_order = replace(w, parts={k: v for k, v in w.parts.items() if k != "perm"})
    np.testing.assert_array_equal(expand_gpu(packed), dequantize(in_order))
    rows = np.array([case.N - 1, 0, -3, 10**6])
    np.testing.assert_array_equal(
        take_rows(packed, jnp.asarray(rows)), whole[rows.clip(0, case.N - 1)]
    )


@pytest.mark.parametrize("layout", ["gpu", "gpu_w8a8"])
@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_shapes_are_known_from_a_header(case: Case, layout: str) -> None:
    w = random_array(case)
    packed = repack(w, layout)
    shapes = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), w)
    foreseen = repack_shape(shapes, layout)
    assert jax.tree.structure(foreseen) == jax.tree.structure(packed)
    for name, part in packed.parts.items():
        assert (foreseen.parts[name].shape, foreseen.parts[name].dtype) == (part.shape, part.dtype)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_blocks_keep_their_size(name: str) -> None:
    """Q4_K's and Q5_K's 6-bit scales take a byte each: 4 bytes in 144 or 176."""
    w = random_array(Case(name, 128, 512))
    added = repack(w, "gpu").nbytes - w.nbytes
    assert added == (128 * 2 * 4 if name in ("q4_k", "q5_k") else 0)


def test_which_products_take_8_bit_activations() -> None:
    def layout(case: Case) -> str:
        return repack(random_array(case), "gpu_w8a8").layout

    assert layout(Case("int8", 2, 256, 256)) == "gpu_w8a8"
    assert layout(Case("fp8", 2, 256, 128)) == "gpu_w8a8"
    assert layout(Case("int8", 2, 256, 256, zeros=True)) == "gpu"
    assert layout(Case("int8", 2, 256, 32)) == "gpu"
    assert layout(Case("q8_0", 2, 256)) == "gpu"


REFUSED = [
    (Case("int4", 2, 96, 48), "int4 with groups of 48 of 96 inputs: want 32, 64, a multiple of"),
    (Case("int8", 2, 64, 16), "int8 with groups of 16 of 64 inputs"),
    (Case("fp8", 2, 576, 192), "fp8 with groups of 192 of 576 inputs"),
    (Case("mxfp4", 2, 32), "no GPU kernels for mxfp4"),
]


@pytest.mark.parametrize(("case", "problem"), REFUSED, ids=str)
def test_what_the_kernels_cannot_read(case: Case, problem: str) -> None:
    w = random_array(case)
    with pytest.raises(ValueError, match=problem):
        repack(w, "gpu")
    with pytest.raises(ValueError, match=problem):
        repack_shape(w, "gpu")


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"codes": np.zeros((128, 128), np.uint8)}, "codes of a q4_0 matrix .* is .*want"),
    ({"codes": np.zeros((128, 64), np.int8)}, "codes of a q4_0 matrix .* is .*want"),
    ({"d": np.zeros((4, 33), np.float16)}, "d of a q4_0 matrix .* is .*want"),
]


@pytest.mark.parametrize(("change", "problem"), HOSTILE, ids=str)
def test_parts_that_are_not_what_they_say(change: dict[str, Any], problem: str) -> None:
    w = repack(random_array(Case("q4_0", 33, 64)), "gpu")
    bad = replace(w, parts={**w.parts, **change})
    with pytest.raises(ValueError, match=problem):
        matmul(jnp.zeros((2, 64)), bad)
    with pytest.raises(ValueError, match=problem):
        take_rows(bad, jnp.zeros(1, jnp.int32))


def test_dense_matrices_stay_plain() -> None:
    w = random_array(Case("bf16", 33, 100))
    packed: QuantizedArray = repack(w, "gpu")
    x = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    want = x.astype(np.float64) @ np.asarray(w.parts["values"], np.float64).T
    np.testing.assert_allclose(matmul(jnp.asarray(x), packed), want, rtol=0, atol=0.1)


def test_the_table_of_tiles() -> None:
    assert [row.max_rows for row in TABLE] == sorted(row.max_rows for row in TABLE)
    assert all(len(row.reason) > 20 for row in TABLE)
    assert choose_tiles(1, 4096).block_m == 8
    assert choose_tiles(100_000, 4096).block_n == 256
    assert choose_tiles(100_000, 4096 + 128).block_n == 128
    with pytest.raises(ValueError, match="want block_m 8, 16, 32, 64 or 128"):
        Tiles(24, 128, 128, 4, 100_000)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 16, 112])
@pytest.mark.parametrize("blocks", [1, 5, 32, 224, 5000])
def test_every_piece_of_a_sum_has_a_step(steps: int, blocks: int) -> None:
    splits = choose_splits(steps, blocks)
    most = -(-steps // splits)
    assert 1 <= splits <= steps
    assert (splits - 1) * most < steps <= splits * most
