"""The Mosaic GPU decode kernel: interpreted against the float64 formula, compiled for Hopper."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.cases import GPU_DECODE_CASES, PoolCase
from pallas_kernels.paged_attention.decode_mosaic import decode_attention
from pallas_kernels.paged_attention.decode_tiles import decode_tile
from tests.support.gpu_pool import (
    LAYER,
    GpuInputs,
    gpu_inputs,
    live_pages,
    other_garbage,
    permuted_pages,
)
from tests.support.sm90a import compile_sm90a, lower_cuda

# Keys that nobody wrote are anything, infinities too, and their scores are masked.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

_CACHES = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_BY_NAME = {case.name: case for case in GPU_DECODE_CASES}


def _options(case: PoolCase) -> dict[str, Any]:
    return {
        "width": case.width,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "splits": case.splits,
    }


def _program(case: PoolCase) -> Any:
    """Of (q, pool, rows, sinks, tree_mask), compiled once for any inputs of the case's shapes."""

    def run(q: jax.Array, pool: dict, rows: dict, sinks: Any, tree_mask: Any) -> jax.Array:
        pages = (pool["key_pages"], pool["value_pages"], jnp.array([LAYER], jnp.int32))
        return decode_attention(
            q, *pages, rows["page_table"], rows["query_lens"], rows["kv_lens"],
            sinks=sinks, tree_mask=tree_mask, key_scales=pool.get("key_scales"),
            value_scales=pool.get("value_scales"), interpret=True, **_options(case),
        )  # fmt: skip

    return jax.jit(run)


def _run(program: Any, x: GpuInputs) -> np.ndarray:
    rows = {name: x.rows[name] for name in ("page_table", "query_lens", "kv_lens")}
    return np.asarray(program(x.q, x.pool, rows, x.sinks, x.tree_mask))


@pytest.mark.parametrize("case", GPU_DECODE_CASES, ids=lambda case: case.name)
def test_matches_the_formula(case: PoolCase) -> None:
    x = gpu_inputs(case)
    out = _run(_program(case), x).astype(np.float64)
    real = (x.expected != 0).any((1, 2))
    assert (out[~real] == 0).all()
    # What the output loses as bfloat16 is not the kernel's error.
    error = np.maximum(np.abs(out - x.expected) - 2.0**-9 * np.abs(x.expected), 0)[real]
    error /= np.sqrt((x.expected[real] ** 2).mean())
    assert error.max() <= 2e-2
    assert error.mean() <= 2e-3


def _bits(out: np.ndarray) -> np.ndarray:
    return out.view(np.uint16)


@pytest.mark.parametrize("name", ["d64-g5-tree", "d80-g1-window-1", "d128-g4-long"])
def test_nothing_else_moves_a_bit(name: str) -> None:
    """Free pages, slots past the end, the order of pages and a neighbour's numbers."""
    case = _BY_NAME[name]
    program, x = _program(case), gpu_inputs(case)
    expected = _bits(_run(program, x))
    assert not np.isnan(_run(program, x).astype(np.float32)).any()
    for changed in (other_garbage(x, 0.0), other_garbage(x, np.inf), permuted_pages(x)):
        np.testing.assert_array_equal(_bits(_run(program, changed)), expected)
    neighbour = dataclasses.replace(x, q=x.q.at[case.width :].multiply(-3.0))
    out = _bits(_run(program, neighbour))
    np.testing.assert_array_equal(out[: case.width], expected[: case.width])
    assert (out[case.width :] != expected[case.width :]).any()


def test_padding_moves_no_bit() -> None:
    """More rows and a wider page table: larger buckets of the same step."""
    case = dataclasses.replace(_BY_NAME["d64-g8-verify"], name="padding")
    x = gpu_inputs(case)
    expected = _run(_program(case), x)
    rows = {name: np.pad(x.rows[name], (0, 1)) for name in ("query_lens", "kv_lens")}
    rows["page_table"] = np.pad(x.rows["page_table"], ((0, 1), (0, 5)))
    padded = dataclasses.replace(
        x, q=jnp.pad(x.q, ((0, case.width), (0, 0), (0, 0)), constant_values=7.0), rows=rows
    )
    out = _run(_program(case), padded)
    np.testing.assert_array_equal(_bits(out[: len(expected)]), _bits(expected))
    assert (out[len(expected) :] == 0).all()


def test_splits_agree() -> None:
    case = dataclasses.replace(_BY_NAME["d96-g16-long"], splits=1)
    x = gpu_inputs(case)
    one = _run(_program(case), x).astype(np.float64)
    three = _run(_program(dataclasses.replace(case, splits=3)), x).astype(np.float64)
    assert np.abs(one - three).max() / np.sqrt((one**2).mean()) <= 8e-3  # a step of bfloat16


@pytest.mark.parametrize("cache", ["bf16", "int8", "fp8"])
def test_reads_nothing_twice(cache: str) -> None:
    case = PoolCase(
        "bytes", ((1, 999), (1, 400)), head_dim=64, num_heads=4, num_kv_heads=1, cache=cache,
        window=600, splits=2,
    )  # fmt: skip
    x = gpu_inputs(case)
    with mgpu.counting_bytes() as copied:
        _run(_program(case), x)
    pages = live_pages((999, 400), case.page_size, case.window)
    numbers = pages * case.page_size * case.num_kv_heads
    bytes_each = {"bf16": (2, 0), "int8": (1, 4), "fp8": (1, 4)}[cache]
    assert copied.by_name["keys"] == copied.by_name["values"]
    assert copied.by_name["keys"] == numbers * case.head_dim * bytes_each[0]
    least = 2 * numbers * (case.head_dim * bytes_each[0] + bytes_each[1]) + x.q.nbytes
    assert copied.total <= 1.1 * least


def _avals(
    cache: str, head_dim: int, page: int = 64, width: int = 1, heads: int = 32, kv_heads: int = 8,
    sinks: bool = False, tree: bool = False, **options: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """A function of the arguments' shapes, and those."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    A, N, B, P = 2, 64, 4, 2048 // page
    shape = (A, N, kv_heads, page, head_dim)
    transposed = (A, N, kv_heads, head_dim, page)
    dtype = _CACHES[cache]
    x: dict[str, Any] = {
        "q": array(B * width, heads, head_dim, dtype=jnp.bfloat16),
        "key_pages": array(*shape, dtype=dtype),
        "value_pages": array(*(shape if cache == "bf16" else transposed), dtype=dtype),
        "layer": array(1),
        "page_table": array(B, P),
        "query_lens": array(B),
        "kv_lens": array(B),
    }
    if cache != "bf16":
        x |= {f"{name}_scales": array(*shape[:4], dtype=jnp.float32) for name in ("key", "value")}
    if sinks:
        x["sinks"] = array(heads, dtype=jnp.float32)
    if tree:
        x["tree_mask"] = array(B, width, width, dtype=jnp.bool)
    run = functools.partial(decode_attention, width=width, scale=head_dim**-0.5, **options)
    return (lambda x: run(**x)), x


# What an engine compiles: each head size and cache, a token a row and a wide verification with
# everything on; then page sizes and one split.
_SHAPES = [
    *[{"cache": c, "head_dim": d} for d in (64, 80, 96, 128, 256) for c in _CACHES],
    *[
        {
            "cache": c, "head_dim": d, "width": 8, "heads": 64, "window": 1024, "softcap": 30.0,
            "sinks": True, "tree": True, "splits": 1,
        }
        for d in (64, 80, 96, 128, 256)
        for c in _CACHES
    ],
    *[
        {"cache": c, "head_dim": 128, "page": p, "splits": 1, "width": w}
        for c, p, w in [
            ("bf16", 16, 2), ("bf16", 128, 1), ("int8", 16, 1), ("int8", 32, 4), ("int8", 128, 1),
            ("fp8", 16, 1), ("fp8", 32, 2), ("fp8", 128, 5),
        ]
    ],
    {"cache": "bf16", "head_dim": 128, "width": 8, "heads": 128, "splits": 1},
    {"cache": "int8", "head_dim": 256, "width": 8, "heads": 128},
    {"cache": "fp8", "head_dim": 128, "width": 8, "heads": 128, "window": 100},
]  # fmt: skip


def _named(shape: dict[str, Any]) -> str:
    plain = [f"d{shape['head_dim']}", shape["cache"]]
    rest = [
        f"{k}{'' if v is True else v}" for k, v in shape.items() if k not in ("cache", "head_dim")
    ]
    return "-".join(plain + rest)


@pytest.mark.sm90a
@pytest.mark.parametrize("shape", _SHAPES, ids=_named)
def test_compiles_for_hopper_without_spills(shape: dict[str, Any]) -> None:
    report = compile_sm90a(*_avals(**shape))
    (kernel,) = (k for k in report.kernels if k.name == "decode_attention")
    assert kernel.shared_memory <= mgpu.SHARED_MEMORY_BYTES
    if shape.get("width", 1) == 1:
        tile = decode_tile(shape["head_dim"], 16 if shape["cache"] == "bf16" else 8)
        # The table's reason: so many blocks share a multiprocessor (1 KB of each is the system's).
        assert tile.blocks * (kernel.shared_memory + 1024) <= 228 * 1024
        assert tile.blocks * kernel.registers * 128 <= 65536


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="see core/backends.py")
@pytest.mark.parametrize("shape", _SHAPES[::6], ids=_named)
def test_lowers_for_cuda(shape: dict[str, Any]) -> None:
    assert "mosaic_gpu" in lower_cuda(*_avals(**shape)).as_text()


def test_refuses_what_it_cannot_run() -> None:
    _, x = _avals("bf16", 64)
    with pytest.raises(ValueError, match=r"head_dim of .* got 72"):
        _lowered(dict(x, **_with_head_dim(x, 72)))
    with pytest.raises(ValueError, match="want values"):
        _lowered(dict(x, value_pages=x["layer"]))
    _, x = _avals("int8", 64)
    with pytest.raises(ValueError, match="needs scales"):
        _lowered({k: v for k, v in x.items() if "scales" not in k})


def _lowered(x: dict[str, Any]) -> None:
    jax.eval_shape(lambda x: decode_attention(**x, width=1, scale=1.0), x)


def _with_head_dim(x: dict[str, Any], head_dim: int) -> dict[str, Any]:
    names = ("q", "key_pages", "value_pages")
    return {n: jax.ShapeDtypeStruct((*x[n].shape[:-1], head_dim), x[n].dtype) for n in names}
