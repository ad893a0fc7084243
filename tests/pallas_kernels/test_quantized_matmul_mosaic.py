"""The packed product for Hopper: interpreted with race detection, lowered, and compiled.

The oracle is the product in float64 of the activations as they are rounded and of the matrix that
the packed weights stand for.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._mgpu import counting_bytes
from pallas_kernels.quantized_matmul import (
    FORMATS,
    QuantizedArray,
    StackedRows,
    expert_matmul,
    gated_matmul,
    group_by_expert,
    matmul,
    matmul_gpu,
    repack,
    repack_shape,
)
from pallas_kernels.quantized_matmul.cases import GPU_CASES, Case
from pallas_kernels.quantized_matmul.mosaic_gpu import make_plan
from pallas_kernels.quantized_matmul.tiles import Tiles
from tests.support.packed_arrays import expansion, random_array
from tests.support.sm90a import compile_sm90a, lower_cuda

pytestmark = pytest.mark.interpreted

WIDE = Tiles(32, 256, 128, 2, 224 * 1024)  # two tiles of 64 rows to a warpgroup
LARGE = Tiles(128, 256, 128, 3, 224 * 1024)  # what a long prompt gets

# Pairs of everything: formats, rows, shapes that divide no tile, where the scales go.
PRODUCTS: list[tuple[Case, int, str, dict[str, Any]]] = [
    (Case("q4_0", 100, 544), 1, "gpu", {"splits": 1}),
    (Case("q4_1", 200, 288), 5, "gpu", {}),
    (Case("q5_0", 70, 544), 8, "gpu", {"splits": 2}),
    (Case("q5_1", 130, 288), 17, "gpu", {}),
    (Case("q8_0", 70, 416), 17, "gpu", {}),
    (Case("q4_k", 130, 512), 8, "gpu", {"splits": 2}),
    (Case("q5_k", 70, 512), 64, "gpu", {}),
    (Case("q6_k", 70, 256), 5, "gpu", {}),
    (Case("int4", 70, 416, 32, zeros=True, perm=True), 17, "gpu", {}),
    (Case("int4", 200, 448, 64), 1, "gpu", {"splits": 3}),
    (Case("int4", 70, 384, 128, zeros=True), 64, "gpu", {}),
    (Case("int4", 70, 300, 300, zeros=True), 5, "gpu", {}),
    (Case("int4", 200, 256, 32), 17, "gpu", {"tiles": WIDE}),
    (Case("int8", 70, 192, 32, zeros=True, perm=True), 5, "gpu", {}),
    (Case("int8", 300, 384, 384), 130, "gpu", {"tiles": LARGE, "splits": 1}),
    (Case("int8", 31, 33, 33), 5, "gpu_w8a8", {}),
    (Case("fp8", 70, 384, 384), 8, "gpu", {}),
    (Case("fp8", 70, 512, 128), 5, "gpu", {"splits": 1}),
    (Case("fp8", 130, 256, 128), 130, "gpu", {}),
    (Case("fp8", 70, 512, 128), 8, "gpu_w8a8", {"splits": 1}),
]


def activations(M: int, K: int, seed: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(M, K)), jnp.bfloat16)


def product_name(product: tuple[Case, int, str, dict[str, Any]]) -> str:
    case, M, layout, options = product
    return "-".join([case.name, f"rows{M}", layout, *options])


def in_8_bits(x: np.ndarray, format_name: str) -> np.ndarray:
    """Rows as products with 8-bit activations have them."""
    limit = np.float32(127 if format_name == "int8" else 448)
    largest = np.abs(x).max(axis=1, keepdims=True)
    scaled, scale = x * (limit / largest), largest * (np.float32(1) / limit)
    if format_name == "int8":
        return np.rint(scaled).astype(np.float64) * scale
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("product", PRODUCTS, ids=product_name)
def test_products(product: tuple[Case, int, str, dict[str, Any]]) -> None:
    case, M, layout, options = product
    w = random_array(case)
    packed = repack(w, layout)
    x = activations(M, case.K)
    y = np.asarray(matmul_gpu(x, packed, interpret=True, **options))
    exact = np.asarray(x, np.float32)
    if layout == "gpu_w8a8":
        assert packed.layout == layout
        exact = in_8_bits(exact, case.format_name)
    want = exact.astype(np.float64) @ expansion(w).T
    # Weights are rounded to bfloat16 in one of the three ways, and nowhere else.
    rounds = make_plan(packed, M, jnp.float32, **options).scales == "weights"
    error = np.abs(y - want).max() / np.sqrt((want**2).mean())
    assert error <= (1e-2 if rounds else 2e-5)


def test_all_ways_of_scales_are_tried() -> None:
    ways = {
        make_plan(repack_shape(shapes(case), layout), M, jnp.float32, **options).scales
        for case, M, layout, options in PRODUCTS
    }
    assert ways == {"end", "sums", "weights"}
    blocks = {form.name for form in FORMATS.values() if form.kind == "blocks"}
    assert {case.format_name for case, *_ in PRODUCTS} == blocks - {"mxfp4"} | {
        "int4", "int8", "fp8",
    }  # fmt: skip


def test_a_row_is_its_own() -> None:
    """Neighbours that change, rows of NaN and filling up to a tile change no bit of a row."""
    packed = repack(random_array(Case("q4_k", 70, 256)), "gpu")
    x = activations(7, 256)
    other = x.at[3:].set(jnp.nan).at[4].set(1e4)
    kept = np.asarray(matmul(x, packed, interpret=True))
    np.testing.assert_array_equal(matmul(other, packed, interpret=True)[:3], kept[:3])
    np.testing.assert_array_equal(matmul(x[:3], packed, interpret=True), kept[:3])


@pytest.mark.parametrize("name", ["q4_0", "q6_k"])
def test_weights_are_read_once(name: str) -> None:
    """Bytes of the bulk copies: the matrix once; the activations once for every 128 outputs."""
    w = random_array(Case(name, 256, 512))
    packed = repack(w, "gpu")
    with counting_bytes() as copied:
        matmul_gpu(activations(5, 512), packed, splits=2, interpret=True)
    activation_bytes = copied.by_name.pop("x")
    assert activation_bytes == 2 * 8 * 512 * 2
    assert w.nbytes <= sum(copied.by_name.values()) <= 1.1 * w.nbytes


def test_pieces_of_a_sum_agree_with_the_whole() -> None:
    packed = repack(random_array(Case("int8", 70, 512, 512)), "gpu")
    x = activations(5, 512)
    whole, pieces = (
        np.asarray(matmul_gpu(x, packed, splits=splits, interpret=True)) for splits in (1, 2)
    )
    np.testing.assert_allclose(whole, pieces, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_large_and_small_activations_fit_float16() -> None:
    """Eight-bit floats are multiplied in float16, which ends at 65504."""
    w = random_array(Case("fp8", 70, 128, 128))
    x = activations(3, 128) * jnp.asarray([[1e6], [1e-9], [0.0]], jnp.bfloat16)
    y = np.asarray(matmul(x, repack(w, "gpu"), interpret=True))
    want = np.asarray(x, np.float64) @ expansion(w).T
    norm = np.sqrt((want**2).mean(axis=1, keepdims=True))
    assert (np.abs(y - want) <= 1e-5 * norm).all()


def test_pieces_in_several_formats_and_a_gate() -> None:
    cases = [Case("q8_0", 32, 128), Case("int4", 32, 128, 128, zeros=True)]
    pieces = [random_array(case, seed) for seed, case in enumerate(cases)]
    stacked = StackedRows(tuple(repack(piece, "gpu") for piece in pieces))
    x = activations(2, 128)
    halves = np.asarray(x, np.float64) @ np.concatenate([expansion(p) for p in pieces]).T
    gate, up = halves[:, :32], halves[:, 32:]
    y = gated_matmul(x, stacked, "silu", interpret=True)
    want = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-4 * np.abs(want).max())


def stacked_experts(case: Case, experts: int) -> tuple[QuantizedArray, np.ndarray]:
    pieces = [random_array(case, seed) for seed in range(experts)]
    packed = [repack(piece, "gpu") for piece in pieces]
    w = jax.tree.map(lambda *parts: jnp.stack(parts), *packed)
    return w, np.stack([expansion(piece) for piece in pieces])


def test_experts() -> None:
    """Rows of every expert, of one and of none; experts that nobody asks for are not read."""
    w, matrices = stacked_experts(Case("int4", 70, 256, 32, zeros=True), 5)
    expert = np.array([3, 0, 3, 3, 1, 0, 3, 3, 3, 3, 3, 3, 3], np.int32)
    x = activations(len(expert), 256)
    rows = group_by_expert(jnp.asarray(expert), 5)
    source = np.asarray(rows.source)
    placed = jnp.where((rows.source >= 0)[:, None], x[jnp.maximum(rows.source, 0)], jnp.nan)
    with counting_bytes() as copied:
        y = np.asarray(expert_matmul(placed, w, rows, interpret=True))[np.asarray(rows.slot)]
    want = np.einsum("tk,tnk->tn", np.asarray(x, np.float64), matrices[expert])
    assert np.abs(y - want).max() <= 1e-2 * np.sqrt((want**2).mean())
    assert sorted(source[source >= 0]) == list(range(len(expert)))
    tiles_read = sum(-(-count // rows.tile) for count in np.bincount(expert) if count)
    assert copied.by_name["codes"] == tiles_read * 128 * 256 // 2


@pytest.mark.parametrize(("T", "num_experts"), [(1, 8), (200, 3), (37, 39)])
def test_experts_places(T: int, num_experts: int) -> None:
    place = jax.jit(group_by_expert, static_argnums=1)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        expert = rng.choice(rng.permutation(num_experts)[: seed + 1], T).astype(np.int32)
        rows = place(expert, num_experts)
        source, slot, experts = (np.asarray(a) for a in (rows.source, rows.slot, rows.experts))
        assert len(source) == len(experts) * rows.tile
        np.testing.assert_array_equal(source[slot], np.arange(T))
        np.testing.assert_array_equal(np.repeat(experts, rows.tile)[slot], expert)
        assert (np.delete(source, slot) == -1).all()
        assert set(experts) - {-1} == set(expert)


def test_rows_that_are_not_in_the_experts_order() -> None:
    w, _ = stacked_experts(Case("int4", 2, 128, 32), 2)
    rows = group_by_expert(jnp.zeros(3, jnp.int32), 2)
    with pytest.raises(ValueError, match=r"got rows \(3, 128\), want \(.*, 128\)"):
        expert_matmul(jnp.zeros((3, 128)), w, rows)
    placed = jnp.zeros((rows.source.shape[0], 128))
    with pytest.raises(ValueError, match="rows come in tiles of 8, want 32"):
        expert_matmul(placed, w, rows, tiles=WIDE)
    with pytest.raises(ValueError, match="codes of a int4 matrix"):
        expert_matmul(placed, replace(w, shape=(200, 128)), rows)


FORM_IDS = [f"{case.name}-{layout}" for case, layout in GPU_CASES]


def shapes(case: Case) -> QuantizedArray:
    """What random_array gives, as shapes."""
    small = random_array(replace(case, N=1))

    def shape(name: str, part: Any) -> Any:
        if name == "perm":
            return part
        return jax.ShapeDtypeStruct((case.N, *part.shape[1:]), part.dtype)

    parts = {name: shape(name, part) for name, part in small.parts.items()}
    return replace(small, parts=parts, shape=(case.N, case.K))


def arguments(case: Case, layout: str, M: int) -> tuple[Any, QuantizedArray]:
    x = jax.ShapeDtypeStruct((M, case.K), jnp.bfloat16)
    return x, repack_shape(shapes(case), layout)


@pytest.mark.parametrize("M", [1, 2048])
@pytest.mark.parametrize(("case", "layout"), GPU_CASES, ids=FORM_IDS)
def test_it_lowers_for_cuda(case: Case, layout: str, M: int) -> None:
    assert "mosaic_gpu" in lower_cuda(matmul, *arguments(case, layout, M)).as_text()


@pytest.mark.sm90a
@pytest.mark.parametrize(("case", "layout"), GPU_CASES, ids=FORM_IDS)
def test_it_compiles_for_few_rows(case: Case, layout: str) -> None:
    """Without spills, and so that two thread blocks share a multiprocessor."""
    (kernel,) = compile_sm90a(matmul, *arguments(case, layout, 8)).kernels
    assert kernel.registers <= 128
    assert kernel.shared_memory <= 113 * 1024


@pytest.mark.sm90a
@pytest.mark.parametrize(
    ("form", "M"),
    [
        ("q4_k-4096x4096-gpu", 64),
        ("q4_k-4096x4096-gpu", 2048),
        ("fp8-4096x4096-group128-gpu_w8a8", 64),
        pytest.param(
            *("fp8-4096x4096-group128-gpu_w8a8", 2048),
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="spills 200 bytes"),
        ),
    ],
)
def test_it_compiles_for_many_rows(form: str, M: int) -> None:
    case, layout = GPU_CASES[FORM_IDS.index(form)]
    assert compile_sm90a(matmul, *arguments(case, layout, M)).kernels


@pytest.mark.sm90a
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="each product is compiled once more")
def test_layers_share_one_kernel() -> None:
    """Equal products of a program are compiled once."""
    x, w = arguments(Case("int4", 4096, 4096, 128), "gpu", 8)

    def layers(x: jax.Array, first: QuantizedArray, second: QuantizedArray) -> jax.Array:
        return matmul(matmul(x, first), second)

    assert len(compile_sm90a(layers, x, w, w).kernels) == 1


@pytest.mark.sm90a
def test_nothing_is_copied_on_the_way_to_the_kernel() -> None:
    """Codes are handed to the kernel as they lie in memory: no part of a program's time or memory
    goes into another form of them."""
    case, layout = Case("int4", 4096, 4096, 128, zeros=True), "gpu"
    report = compile_sm90a(matmul, *arguments(case, layout, 8))
    memory = report.compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 4096 // 4
