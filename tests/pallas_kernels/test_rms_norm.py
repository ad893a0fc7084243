"""The norm on both backends against float64; natively a row's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rms_norm.cases import CASES

EPS = 1e-5


def make(rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows * 1000 + size)
    x = rng.standard_normal((rows, size)) * 10.0 ** rng.integers(-3, 4, (rows, 1))
    return x.astype(np.float32), rng.standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: tuple[int, int], backend: str) -> None:
    x, weight = make(*case)
    got = np.asarray(rms_norm(x, weight, EPS, backend=backend))
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-30)


def test_neighbours_change_no_bit() -> None:
    x, weight = make(64, 100)
    norm = jax.jit(lambda x: rms_norm(x, weight, EPS, backend="cpu"))
    together = np.asarray(norm(x))
    for rows in (1, 2, 5, 63):
        np.testing.assert_array_equal(norm(x[:rows]), together[:rows])
    np.testing.assert_array_equal(norm(x[::-1].copy()), together[::-1])


def test_dtype_and_leading_axes_are_kept() -> None:
    x = jnp.ones((2, 3, 8), jnp.bfloat16)
    for backend in ("reference", "cpu"):
        got = rms_norm(x, jnp.full(8, 2, jnp.bfloat16), EPS, backend=backend)
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(np.asarray(got, np.float32), 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \(3,\) does not fit"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(3), EPS)
    with pytest.raises(NotImplementedError, match="reference, cpu"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(4), EPS, backend="gpu")
