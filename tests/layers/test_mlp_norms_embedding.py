"""The small layers against float64 formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.backends import embed, make_ops
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.core.ops import Ops
from jaxserve.layers.embedding import logits
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norms import centered_rms_norm
from pallas_kernels.gated_activation import ACTIVATIONS

ERF = np.vectorize(math.erf)
FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + ERF(x / math.sqrt(2))),
    "gelu_new": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}
FORMULAS["gelu_pytorch_tanh"] = FORMULAS["gelu_new"]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return make_ops("reference", KVSpec((KVGroup("global", (0,), 1, 4),)))


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation(name: str) -> None:
    x = np.linspace(-6, 6, 101)
    got = ACTIVATIONS[name](jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, FORMULAS[name](x), atol=2e-6)


def test_gated_mlp_takes_gate_first_and_both_biases(ops: Ops) -> None:
    x, gate, up, down = _noise(5, 6), _noise(8, 6), _noise(8, 7)[:, :6], _noise(6, 8)
    gate_up_bias, down_bias = _noise(16), _noise(6)
    got = gated_mlp(ops, "silu", x, np.concatenate([gate, up]), down, gate_up_bias, down_bias)
    wide = x.astype(float)
    inner = FORMULAS["silu"](wide @ gate.T + gate_up_bias[:8]) * (wide @ up.T + gate_up_bias[8:])
    np.testing.assert_allclose(got, inner @ down.T + down_bias, rtol=2e-5, atol=2e-5)


def test_centered_norm_adds_one_to_the_weight(ops: Ops) -> None:
    x, weight = _noise(3, 4, 8), _noise(8) * np.float32(0.1)
    wide = x.astype(float)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight.astype(float))
    np.testing.assert_allclose(centered_rms_norm(ops, x, weight, 1e-6), want, rtol=1e-5)


def test_embed_reads_rows_and_padding_may_hold_any_id() -> None:
    table = _noise(7, 3)
    got = embed(jnp.asarray(table), jnp.asarray([6, 0, 1 << 30]))
    np.testing.assert_array_equal(got[:2], table[[6, 0]])
    assert np.isfinite(got).all()


def test_logits_are_float32_and_capped(ops: Ops) -> None:
    hidden, table = _noise(2, 3), _noise(9, 3) * 20
    want = hidden.astype(float) @ table.astype(float).T
    np.testing.assert_allclose(logits(ops, hidden, table), want, rtol=1e-5, atol=1e-5)
    capped = logits(ops, hidden, table, 5.0)
    np.testing.assert_allclose(capped, 5 * np.tanh(want / 5), rtol=1e-5, atol=1e-5)
    assert logits(ops, jnp.asarray(hidden, jnp.bfloat16), table).dtype == jnp.float32
