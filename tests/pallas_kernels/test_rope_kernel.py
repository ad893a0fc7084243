"""The rotation on both backends against float64; natively a head's bits are its own."""

import jax
import numpy as np
import pytest

from pallas_kernels.rope import rotate
from pallas_kernels.rope.cases import CASES


def make(T: int, H: int, D: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(T + H + D)
    x = rng.standard_normal((T, H, D)).astype(np.float32)
    angle = rng.uniform(-10, 10, (T, D // 2))
    return x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_complex_numbers(case: tuple[int, int, int], backend: str) -> None:
    x, cos, sin = make(*case)
    half = case[2] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin.astype(np.float64))[:, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(x, cos, sin, backend=backend), want, atol=1e-6)


@pytest.mark.parametrize("D", [6, 24, 64])
def test_neighbours_change_no_bit(D: int) -> None:
    x, cos, sin = make(64, 3, D)
    turn = jax.jit(lambda x, cos, sin: rotate(x, cos, sin, backend="cpu"))
    together = np.asarray(turn(x, cos, sin))
    for tokens in (1, 2, 5, 63):
        np.testing.assert_array_equal(
            turn(x[:tokens], cos[:tokens], sin[:tokens]), together[:tokens]
        )


def test_what_does_not_fit_is_refused() -> None:
    x, cos, sin = make(2, 3, 8)
    with pytest.raises(ValueError, match=r"want \(2, 4\)"):
        rotate(x, cos[:1], sin[:1])
    with pytest.raises(ValueError, match="do not fit"):
        rotate(x[..., :7], cos, sin)
    with pytest.raises(NotImplementedError, match="reference, cpu"):
        rotate(x, cos, sin, backend="gpu")
