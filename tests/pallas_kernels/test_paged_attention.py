"""Paged attention against a float64 formula, and the properties every backend must have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.support.attention_inputs import make_inputs, oracle


def run(case: Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    inputs = dict(inputs)
    tree, sinks = inputs.pop("tree_mask"), inputs.pop("sinks")

    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return paged_attention(
            **arrays,
            decode_rows=len(case.decode),
            width=case.width,
            scale=case.head_dim**-0.5,
            window=case.window,
            softcap=case.softcap,
            sinks=None if sinks is None else jnp.asarray(sinks),
            tree_mask=None if tree is None else jnp.asarray(tree),
        )

    return np.asarray(jax.jit(call)(inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_float64_oracle_with_nan_in_free_slots(case: Case) -> None:
    inputs = make_inputs(case)
    got = run(case, inputs)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, oracle(case, inputs), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_free_slots_and_page_order_change_no_bit(case: Case) -> None:
    inputs = make_inputs(case)
    expected = run(case, inputs)
    rng = np.random.default_rng(1)
    order = np.concatenate([[0], rng.permutation(np.arange(1, len(inputs["key_pages"])))])
    where = np.argsort(order)
    moved = dict(inputs)
    for name in ("key_pages", "value_pages"):
        pages = inputs[name][order]
        moved[name] = np.where(np.isnan(pages), np.float32(7.5), pages)
    moved["page_table"] = np.where(
        inputs["page_table"] == 0, 0, where[inputs["page_table"]]
    ).astype(np.int32)
    assert np.array_equal(run(case, moved), expected)


def test_neighbours_change_no_bit_of_a_decode_row() -> None:
    case = next(c for c in CASES if c.name == "decode-ragged")
    inputs = make_inputs(case)
    expected = run(case, inputs)
    changed = {k: None if v is None else v.copy() for k, v in inputs.items()}
    pages = changed["page_table"][3]
    changed["key_pages"][pages[pages > 0]] *= 3
    changed["q"][3] += 1
    got = run(case, changed)
    assert np.array_equal(got[:3], expected[:3])
    assert not np.array_equal(got[3], expected[3])


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = CASES[0]
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"][:, :3]
    with pytest.raises(ValueError, match="multiple of KV heads"):
        run(case, inputs)
    with pytest.raises(NotImplementedError, match="backend 'magic'"):
        paged_attention(
            *(jnp.asarray(make_inputs(case)[k]) for k in (
                "q", "key_pages", "value_pages", "page_table", "query_starts", "query_lens",
                "kv_lens")),
            decode_rows=1, width=1, scale=1.0, backend="magic",
        )  # fmt: skip
