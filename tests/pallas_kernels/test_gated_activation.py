"""The gate on both backends against float64; natively a number's bits are its own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_activation import ACTIVATIONS, gated_activation
from pallas_kernels.gated_activation.cases import CASES


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda a: a / 2 * math.erfc(-a / math.sqrt(2)))(x)


FORMULAS = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def test_every_activation_has_a_formula_here() -> None:
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMULAS)
def test_against_float64(name: str, backend: str) -> None:
    edges = [0.0, -0.0, 1e-30, -1e-30, 0.6, -0.6, 5.0, -5.0, 30.0, -30.0, 88.0, -88.0, 500.0]
    gate = np.concatenate([np.linspace(-12, 12, 999), edges]).astype(np.float32)
    up = np.random.default_rng(0).standard_normal(gate.size).astype(np.float32)
    got = gated_activation(np.concatenate([gate, up])[None], name, backend=backend)[0]
    want = FORMULAS[name](gate.astype(np.float64)) * up
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=6e-7)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_neighbours_change_no_bit(case: tuple[int, int], name: str) -> None:
    T, F = case
    both = np.random.default_rng(T + F).standard_normal((T, 2 * F)).astype(np.float32)
    gate = jax.jit(lambda both: gated_activation(both, name, backend="cpu"))
    got = np.asarray(gate(both))
    assert got.shape == case
    for row in range(T):
        np.testing.assert_array_equal(gate(both[row : row + 1])[0], got[row])
        alone = np.array([[both[row, F - 1], both[row, -1]]])
        assert gate(alone)[0, 0] == got[row, -1]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        gated_activation(jnp.ones((2, 3)), "silu")
    with pytest.raises(ValueError, match="known are"):
        gated_activation(jnp.ones((2, 4)), "mish")
    with pytest.raises(NotImplementedError, match="reference, cpu"):
        gated_activation(jnp.ones((2, 4)), "silu", backend="gpu")
