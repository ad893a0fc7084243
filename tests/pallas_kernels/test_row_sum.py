"""Row sums on both backends against float64; natively a row's sum is its own."""

import jax
import numpy as np
import pytest

from pallas_kernels.row_sum import row_sum
from pallas_kernels.row_sum.cases import CASES


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: tuple[int, int], backend: str) -> None:
    x = np.random.default_rng(sum(case)).random(case, np.float32)
    got = row_sum(jax.numpy.asarray(x), backend=backend)
    np.testing.assert_allclose(got, x.astype(np.float64).sum(axis=1), rtol=1e-6)


def test_neighbours_change_no_bit() -> None:
    x = np.random.default_rng(0).random((64, 259), np.float32)
    total = jax.jit(lambda x: row_sum(x, backend="cpu"))
    together = np.asarray(total(x))
    for rows in (1, 2, 5, 63):
        np.testing.assert_array_equal(total(x[:rows]), together[:rows])


def test_fewer_terms_never_sum_to_more() -> None:
    """What top_p relies on: leaving out terms that are not negative never makes a sum larger."""
    rng = np.random.default_rng(1)
    x = rng.random((200, 1000), np.float32) ** 8
    less = np.where(rng.random(x.shape) < 0.1, x, 0).astype(np.float32)
    assert (np.asarray(row_sum(less, backend="cpu")) <= np.asarray(row_sum(x, backend="cpu"))).all()


def test_nan_and_infinity_pass_through() -> None:
    x = np.ones((3, 100), np.float32)
    x[0, 7], x[1, 99] = np.nan, np.inf
    got = np.asarray(row_sum(x, backend="cpu"))
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert got[2] == 100


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        row_sum(np.ones((2, 3), np.int32))
    with pytest.raises(NotImplementedError, match="reference, cpu"):
        row_sum(np.ones((2, 3), np.float32), backend="gpu")
