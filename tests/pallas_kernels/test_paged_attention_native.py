"""The native attention: the float64 formula, and `==` where the design promises bits."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native  # noqa: F401  used by the subprocess below
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention.cases import CASES, ODD_CASES, Case
from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.support.attention_inputs import dequantized, make_inputs, oracle, quantized

ALL_CASES = CASES + ODD_CASES

# Weights are sums of up to a thousand float32 products of order 1.
ATOL, RTOL = 4e-6, 2e-5


def run(case: Case, inputs: dict[str, np.ndarray], **changes: object) -> np.ndarray:
    """Reads only: the pool already holds all keys and values."""
    x = {"key_scales": None, "value_scales": None, **inputs, **changes}
    tree, sinks = x.pop("tree_mask"), x.pop("sinks")
    T = x["q"].shape[0]

    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return paged_attention_cpu(
            k=None, v=None, write_slot=jnp.full(T, -1, jnp.int32), **arrays,
            decode_rows=len(case.decode), width=case.width, scale=case.head_dim**-0.5,
            window=case.window, softcap=case.softcap,
            sinks=sinks, tree_mask=tree,
        )[0]  # fmt: skip

    return np.asarray(jax.jit(call)(x))


def case_named(name: str) -> Case:
    return next(c for c in ALL_CASES if c.name == name)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: c.name)
def test_equals_float64_oracle_with_nan_in_free_slots(case: Case) -> None:
    inputs = make_inputs(case)
    got = run(case, inputs)
    np.testing.assert_allclose(got, oracle(case, inputs), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: c.name)
def test_free_slots_and_page_order_change_no_bit(case: Case) -> None:
    inputs = make_inputs(case)
    expected = run(case, inputs)
    order = np.random.default_rng(1).permutation(np.arange(1, len(inputs["key_pages"])))
    order = np.concatenate([[0], order])
    moved = dict(inputs)
    for name in ("key_pages", "value_pages"):
        pages = inputs[name][order]
        moved[name] = np.where(np.isnan(pages), np.float32(7.5), pages)
    table = inputs["page_table"]
    moved["page_table"] = np.where(table == 0, 0, np.argsort(order)[table]).astype(np.int32)
    assert np.array_equal(run(case, moved), expected)


@pytest.mark.parametrize("page_size", [1, 7, 64, 100])
def test_page_size_changes_no_bit(page_size: int) -> None:
    case = case_named("long")
    inputs = make_inputs(case)
    expected = run(case, inputs)
    assert np.array_equal(run(case, repaged(case, inputs, page_size)), expected)


def repaged(case: Case, x: dict[str, np.ndarray], page_size: int) -> dict[str, np.ndarray]:
    """The same keys and values in pages of another size."""
    rows = case.decode + case.prefill
    count = [-(-kv // page_size) for _, kv in rows]
    table = np.zeros((len(rows), max(count)), np.int32)
    shape = (1 + sum(count), page_size, *x["key_pages"].shape[2:])
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    free = 1
    for r, (_, kv) in enumerate(rows):
        table[r, : count[r]] = np.arange(free, free + count[r])
        free += count[r]
        at = np.arange(kv)
        old = x["page_table"][r, at // case.page_size], at % case.page_size
        new = table[r, at // page_size], at % page_size
        keys[new], values[new] = x["key_pages"][old], x["value_pages"][old]
    return x | {"key_pages": keys, "value_pages": values, "page_table": table}


def test_neighbours_change_no_bit() -> None:
    case = case_named("mixed")
    inputs = make_inputs(case)
    expected = run(case, inputs)
    starts, lens = inputs["query_starts"], inputs["query_lens"]
    for r in np.flatnonzero(lens):
        changed = {k: None if v is None else v.copy() for k, v in inputs.items()}
        pages = changed["page_table"][r]
        changed["key_pages"][pages[pages > 0]] *= 3
        own = slice(starts[r], starts[r] + lens[r])
        changed["q"][own] += 1
        got = run(case, changed)
        others = np.ones(len(got), bool)
        others[own] = False
        assert np.array_equal(got[others], expected[others])
        assert not np.array_equal(got[own], expected[own])


def one_row(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    chunks: list[tuple[int, bool]],
    *,
    page_size: int = 16,
    int8: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """All outputs of one request written and attended in steps of (tokens, as a decode row)."""
    S, _, D = q.shape
    K = k.shape[1]
    num_pages = -(-S // page_size)
    table = np.random.default_rng(3).permutation(np.arange(1, num_pages + 1))
    table = table[None].astype(np.int32)
    shape = (num_pages + 1, page_size, K)
    dtype = jnp.int8 if int8 else jnp.float32
    pool = [jnp.zeros((*shape, D), dtype)] * 2
    pool += [jnp.full(shape, jnp.nan, jnp.float32)] * 2 if int8 else [None, None]
    outs, at = [], 0
    for count, decode in chunks:
        position = np.arange(at, at + count)
        out, *pool = paged_attention_cpu(
            q[position], k[position], v[position], *pool,
            (table[0, position // page_size] * page_size + position % page_size).astype(np.int32),
            table, np.zeros(1, np.int32), np.array([count], np.int32),
            np.array([at + count], np.int32), None, None,
            decode_rows=int(decode), width=count if decode else 1, scale=D**-0.5, window=window,
            softcap=softcap,
        )  # fmt: skip
        outs.append(np.asarray(out))
        at += count
    assert at == S
    return np.concatenate(outs)


@pytest.mark.parametrize(
    ("options", "head_dim", "heads"),
    [
        ({}, 64, (9, 3)),
        ({"window": 40}, 20, (4, 2)),
        ({"softcap": 5.0}, 8, (4, 1)),
        ({"int8": True}, 64, (9, 3)),
    ],
    ids=["plain", "window-odd", "softcap", "int8"],
)
def test_chunks_and_kinds_of_rows_change_no_bit(
    options: dict, head_dim: int, heads: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    S = 150
    q = rng.standard_normal((S, heads[0], head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, S, heads[1], head_dim)).astype(np.float32)
    one_by_one = one_row(q, k, v, [(1, True)] * S, **options)
    for chunks in (
        [(S, False)],
        [(1, False)] * 3 + [(16, False)] * 9 + [(3, False)],
        [(64, False), (7, True), (70, False), (1, True), (8, True)],
    ):
        assert np.array_equal(one_row(q, k, v, chunks, **options), one_by_one), chunks
    other_pages = one_row(q, k, v, [(149, False), (1, True)], page_size=24, **options)
    assert np.array_equal(other_pages, one_by_one)


@pytest.mark.parametrize(
    "case",
    [c for c in ALL_CASES if c.name in ("mixed-gqa9", "prefill-window", "verify-tree", "odd-head20",
                                       "odd-head5", "decode-mha-head80", "prefill-sinks-softcap")],
    ids=lambda c: c.name,
)  # fmt: skip
def test_int8_pages_equal_float64_on_dequantized_ones(case: Case) -> None:
    inputs = make_inputs(case)
    keys, key_scales = quantized(inputs["key_pages"])
    values, value_scales = quantized(inputs["value_pages"])
    x = inputs | {
        "key_pages": keys, "value_pages": values,
        "key_scales": key_scales, "value_scales": value_scales,
    }  # fmt: skip
    exact = inputs | {
        "key_pages": dequantized(keys, key_scales),
        "value_pages": dequantized(values, value_scales),
    }
    want = oracle(case, exact)
    np.testing.assert_allclose(run(case, x), want, atol=ATOL, rtol=RTOL)
    tree, sinks = x.pop("tree_mask"), x.pop("sinks")
    reference = paged_attention_reference(
        **jax.tree.map(jnp.asarray, x), decode_rows=len(case.decode), width=case.width,
        scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap,
        sinks=None if sinks is None else jnp.asarray(sinks),
        tree_mask=None if tree is None else jnp.asarray(tree),
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(reference), want, atol=ATOL, rtol=RTOL)


def write_only(k: np.ndarray, v: np.ndarray, slots: list[int], pool: list) -> list:
    """The pool after writing; the queries see nothing."""
    T, _, D = k.shape
    return paged_attention_cpu(
        jnp.zeros((T, k.shape[1], D)), k, v, *pool, np.array(slots, np.int32),
        np.zeros((1, 1), np.int32), *[np.zeros(1, np.int32)] * 3, None, None,
        decode_rows=0, width=1, scale=1.0, window=None, softcap=None,
    )[1:]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_writes_as_the_reference_does_and_skips_slots_outside(dtype: str) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 6, 3, 20)).astype(np.float32)
    k[2] = 0
    v[3, 1, 4] = np.inf
    pool = [jnp.ones((4, 5, 3, 20), dtype)] * 2
    pool += [jnp.ones((4, 5, 3))] * 2 if dtype == "int8" else [None, None]
    got = write_only(k, v, [7, -1, 0, 19, 20, 2**31 - 1], pool)
    slots = jnp.array([7, -1, 0, 19, -1, -1])
    want = write_kv(*pool[:2], k, v, slots, key_scales=pool[2], value_scales=pool[3])
    # XLA multiplies by 1 / 127, so scales differ in the last bit and a code at a tie by one.
    tolerance = [1, 1, 1e-8, 1e-8] if dtype == "int8" else [0, 0]
    for a, b, atol in zip(got, want, tolerance, strict=False):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
        assert (a != b).sum() < 20
    if dtype == "int8":
        assert np.isnan(np.asarray(got[3]).reshape(20, 3)[19, 1])


def test_bfloat16_pages_are_read_exactly() -> None:
    case = case_named("mixed-gqa9")
    inputs = make_inputs(case)
    pages = {n: jnp.asarray(inputs[n], jnp.bfloat16) for n in ("key_pages", "value_pages")}
    exact = inputs | {n: np.asarray(x, np.float64) for n, x in pages.items()}
    np.testing.assert_allclose(run(case, inputs | pages), oracle(case, exact), atol=ATOL, rtol=RTOL)


def test_hostile_lengths_pages_and_starts_stay_inside_the_buffers() -> None:
    """They are data, so nothing can refuse them; under the sanitizers this test is the proof."""
    case = case_named("mixed")
    inputs = make_inputs(case)
    expected = run(case, inputs)
    huge = np.int32(2**31 - 1)
    for name, row, value in [
        ("page_table", 2, huge), ("page_table", 0, -5), ("kv_lens", 2, huge), ("kv_lens", 0, -7),
        ("query_lens", 0, huge), ("query_lens", 3, huge), ("query_starts", 3, huge),
        ("query_starts", 5, -huge), ("query_lens", 3, -1),
    ]:  # fmt: skip
        changed = dict(inputs)
        changed[name] = inputs[name].copy()
        changed[name][row] = value
        got = run(case, changed)
        if row == 2:
            assert np.array_equal(got[0], expected[0])


def test_padding_says_zero() -> None:
    case = case_named("prefill-chunk")
    inputs = make_inputs(case)
    inputs["q"][-case.pad_tokens :] = np.nan
    assert (run(case, inputs)[-case.pad_tokens :] == 0).all()


def test_a_nan_key_is_seen() -> None:
    case = case_named("decode-1")
    inputs = make_inputs(case)
    inputs["key_pages"][inputs["page_table"][0, 0], 3] = np.nan
    assert np.isnan(run(case, inputs)).all()


def test_the_pool_is_updated_in_place_when_donated() -> None:
    pool = tuple(jnp.zeros((512, 16, 3, 64)) for _ in range(2))
    q, k = jnp.ones((1, 9, 64)), jnp.ones((1, 3, 64))
    one = jnp.ones(1, jnp.int32)
    options = {"decode_rows": 1, "width": 1, "scale": 1.0, "window": None, "softcap": None}
    layer = jax.jit(partial(paged_attention_cpu, **options))

    def step(pool: tuple[jax.Array, jax.Array], q: jax.Array) -> tuple:
        keys, values = pool
        for _ in range(2):  # an inner jit, twice, as a model's layers do
            out, keys, values, _, _ = layer(
                q, k, k, keys, values, None, None, one, one[None], one * 0, one, one, None, None
            )
            q = q + out
        return q, (keys, values)

    compiled = jax.jit(step, donate_argnums=0).lower(pool, q).compile()
    assert " copy(" not in compiled.as_text()
    before = [x.unsafe_buffer_pointer() for x in pool]
    _, pool = compiled(pool, q)
    assert [x.unsafe_buffer_pointer() for x in pool] == before


_PAGES = ("key_pages", "value_pages")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((2, 3, 64), np.float32)}, "multiple of KV heads"),
        ({"k": np.zeros((2, 2, 32), np.float32)}, "k is"),
        ({"k": None}, "both k and v"),
        ({"write_slot": np.zeros(3, np.int32)}, "write_slot is"),
        ({"kv_lens": np.zeros(2, np.int32)}, "a page table of 1 rows"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks are"),
        ({"tree_mask": np.ones((1, 1, 1), bool)}, "tree_mask is"),
        ({"width": 0}, "decode rows of width 0"),
        ({"width": 3}, "decode rows of width 3"),
        ({"decode_rows": 2}, "2 decode rows"),
        ({"window": 0}, "window is 0"),
        ({"softcap": -1.0}, "softcap is"),
        ({"key_scales": np.zeros((4, 16, 2), np.float32)}, "take no scales"),
        ({"key_pages": np.zeros((4, 16, 2, 64), np.int8)}, "pages are"),
        ({n: np.zeros((4, 16, 2, 64), np.int8) for n in _PAGES}, "need float32"),
        ({n: np.zeros((4, 16, 2, 64), np.float16) for n in _PAGES}, "one of"),
        ({n: np.zeros((0, 16, 2, 64), np.float32) for n in _PAGES}, "no pages"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    pages, new = np.zeros((4, 16, 2, 64), np.float32), np.zeros((2, 2, 64), np.float32)
    arguments = {
        "q": np.zeros((2, 4, 64), np.float32), "k": new, "v": new, "key_pages": pages,
        "value_pages": pages, "key_scales": None, "value_scales": None,
        "write_slot": np.zeros(2, np.int32), "page_table": np.zeros((1, 2), np.int32),
        "query_starts": np.zeros(1, np.int32), "query_lens": np.ones(1, np.int32),
        "kv_lens": np.ones(1, np.int32), "sinks": None, "tree_mask": None,
        "decode_rows": 1, "width": 2, "scale": 1.0, "window": None, "softcap": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        paged_attention_cpu(**{**arguments, **changes})


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 4))

    def rows(longest: int, most: int) -> tuple[tuple[int, int], ...]:
        counts = draw(st.lists(st.integers(0, longest), max_size=most))
        return tuple((n, n + draw(st.integers(0, 150)) if n else 0) for n in counts)

    decode, prefill = rows(width, 4), rows(40, 3)
    kv_heads = draw(st.integers(1, 3))
    return Case(
        "random", decode, prefill or ((1, 1),), width=width, pad_tokens=draw(st.integers(0, 5)),
        num_heads=kv_heads * draw(st.integers(1, 4)), num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 13, 24, 64])), page_size=draw(st.integers(1, 40)),
        window=draw(st.none() | st.integers(1, 100)), softcap=draw(st.none() | st.just(4.0)),
        sinks=draw(st.booleans()), tree=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(random_cases(), st.integers(0, 1000))
def test_random_ragged_batches(case: Case, seed: int) -> None:
    inputs = make_inputs(case, seed)
    np.testing.assert_allclose(run(case, inputs), oracle(case, inputs), atol=1e-5, rtol=1e-4)


_PRINT_OUTPUTS = """
import sys
sys.path[:0] = [{root!r}]
import numpy as np
from tests.pallas_kernels import test_paged_attention_native as t
assert t.native.isa() == "baseline"
names = {names!r}
cases = [t.case_named(name) for name in names]
np.savez(sys.argv[1], **{{case.name: t.run(case, t.make_inputs(case)) for case in cases}})
"""


def test_baseline_instructions_agree_within_rounding(tmp_path: Path) -> None:
    names = ["mixed-gqa9", "odd-head20", "prefill-sinks-softcap", "verify-tree", "decode-window"]
    root = str(Path(__file__).parents[2])
    out = tmp_path / "out.npz"
    code = _PRINT_OUTPUTS.format(root=root, names=names)
    subprocess.run(
        [sys.executable, "-c", code, str(out)],
        env={**os.environ, "JAXSERVE_CPU_ISA": "baseline", "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    with np.load(out) as got:
        for name in names:
            here = run(case_named(name), make_inputs(case_named(name)))
            np.testing.assert_allclose(got[name], here, atol=ATOL, rtol=RTOL)
