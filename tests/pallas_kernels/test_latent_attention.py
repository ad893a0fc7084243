"""Latent attention in plain jnp against the float64 formula, and what its arguments must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.cases import CASES, Case
from tests.support.latent_inputs import make_inputs, oracle, softmax_scale

MIXED = Case("mixed", ((1, 33), (0, 0)), ((9, 61), (3, 140)), pad_tokens=2)


def run(case: Case, inputs: dict) -> np.ndarray:
    arrays = {name: None if x is None else jnp.asarray(x) for name, x in inputs.items()}
    call = jax.jit(
        lambda a: latent_attention(
            **a,
            decode_rows=len(case.decode),
            width=case.width,
            scale=softmax_scale(case),
            value_dim=case.value_dim,
        )
    )
    return np.asarray(call(arrays).astype(jnp.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_matches_the_formula(case: Case):
    inputs = make_inputs(case)
    want = oracle(case, inputs)
    got = run(case, inputs)
    error = np.abs(got - want)
    rms = np.sqrt((want[want != 0] ** 2).mean())
    assert error.max() < 1e-2 * max(rms, 1)
    assert np.all(got[want == 0] == 0)


def test_what_others_hold_changes_no_bit():
    inputs = make_inputs(MIXED)
    before = run(MIXED, inputs)
    others = {k: None if v is None else v.copy() for k, v in inputs.items()}
    pages = others["latent_pages"]
    free = np.isnan(pages.astype(np.float32))
    assert free.any()
    pages[free] = 3
    np.testing.assert_array_equal(run(MIXED, others), before)
    order = np.random.default_rng(1).permutation(pages.shape[1])
    moved = dict(others, latent_pages=np.empty_like(pages))
    moved["latent_pages"][:, order] = pages
    moved["page_table"] = order[others["page_table"]].astype(np.int32)
    np.testing.assert_array_equal(run(MIXED, moved), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((14, 16, 512), np.float32)}, "multiply the queries into the latent space"),
        ({"page_table": np.zeros((2, 3), np.int32)}, "want a table of 4 rows"),
        ({"value_dim": 577}, "want 1 to 576"),
        ({"latent_scales": np.ones((2, 9, 2, 64), np.float32)}, "want None"),
        ({"latent_pages": np.zeros((2, 9, 64, 576), np.int8)}, r"want \(2, 9, 2, 64\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict, message: str):
    arguments = make_inputs(MIXED) | {"value_dim": 512} | change
    with pytest.raises(ValueError, match=message):
        latent_attention(**arguments, decode_rows=2, width=1, scale=1.0)


def test_an_unknown_backend_is_refused():
    with pytest.raises(NotImplementedError, match="it has: reference"):
        latent_attention(**make_inputs(MIXED), decode_rows=2, width=1, scale=1.0, backend="triton")
