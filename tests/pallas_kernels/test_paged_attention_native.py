"""The native attention: the float64 formula, and `==` where the design promises bits."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.support.attention_inputs import dequantized, make_inputs, oracle, quantized

# Shapes that divide no tile, block, page or vector.
ODD_CASES = (
    Case("odd-head5", ((1, 1), (1, 70)), ((33, 97),), num_heads=3, num_kv_heads=1, head_dim=5),
    Case("odd-head20", ((1, 65),), ((19, 84),), num_heads=14, num_kv_heads=2, head_dim=20),
    Case("odd-head36", ((1, 130),), ((7, 7),), num_heads=1, num_kv_heads=1, head_dim=36),
    Case("odd-page3", ((2, 67), (1, 3)), ((40, 40),), width=3, page_size=3, window=50),
    Case("head96-g5", ((1, 200),), ((70, 200),), num_heads=5, num_kv_heads=1, head_dim=96),
    Case("head128-g4", ((1, 200),), ((70, 129),), num_heads=8, num_kv_heads=2, head_dim=128),
    Case("head256-g4-window", ((1, 600),), ((30, 600),), head_dim=256, num_kv_heads=1, window=512),
    Case("many-heads", ((1, 66),), ((3, 66),), num_heads=100, num_kv_heads=1, head_dim=8),
    Case("long", ((1, 1500), (1, 640)), ((9, 1000),), num_heads=9, num_kv_heads=3, head_dim=64),
    Case("tree-window", ((5, 140), (4, 66)), width=5, window=30, tree=True, sinks=True),
)
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
