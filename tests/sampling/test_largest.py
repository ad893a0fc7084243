import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import largest

WIDTHS = (1, 5, 255, 256, 257, 3000, 4100)


def rows(width, seed=0, step=0.0):
    values = np.random.default_rng(seed).normal(size=(3, width)).astype(np.float32) * 3
    return np.round(values / step) * np.float32(step) if step else values


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_argmax_is_the_lowest_index_of_the_largest(width, step):
    values = rows(width, step=step)
    peak, index = jax.jit(largest.argmax)(values)
    np.testing.assert_array_equal(index, values.argmax(axis=1))
    np.testing.assert_array_equal(peak, values.max(axis=1))


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_of_negative_and_infinite_rows(width):
    values = -1 - np.abs(rows(width))
    values[1] = -np.inf
    values[2, width // 2] = np.inf
    peak, index = jax.jit(largest.argmax)(values)
    np.testing.assert_array_equal(index, values.argmax(axis=1))
    np.testing.assert_array_equal(peak, values.max(axis=1))


@pytest.mark.parametrize("width", [128, 257, 3000, 4100])
@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("k", [1, 20, 128])
def test_top_k_values_are_the_sorted_ones_and_indices_point_at_them(width, step, k):
    values = rows(width, step=step)
    top, index = jax.jit(largest.top_k, static_argnums=1)(values, k)
    np.testing.assert_array_equal(top, -np.sort(-values, axis=1)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(values, np.asarray(index), 1), top)
    assert all(len(set(row)) == k for row in np.asarray(index).tolist())


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, -np.inf, 1e-45, -1e-45, 3e38, -3e38]),
)
_kth = jax.jit(largest.kth_largest)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=17, max_size=17), st.integers(1, 17))
def test_kth_largest_is_exact_for_all_floats(values, k):
    # XLA:CPU flushes subnormal numbers to zero, in comparisons too; so does the oracle.
    array = np.array(values, np.float32)
    array[np.abs(array) < np.finfo(np.float32).tiny] = 0
    found = _kth(np.array([values], np.float32), jnp.array([k], jnp.int32))
    assert found[0] == np.sort(array)[::-1][k - 1]


def compiled(function, *arrays):
    return jax.jit(function).lower(*arrays).compile().as_text()


def test_top_k_compiles_to_partial_sorts_even_if_the_caller_slices():
    values = np.zeros((4, 49_152), np.float32)
    text = compiled(lambda x: (largest.top_k(x, 128)[0][:, -1], largest.top_k(x, 128)[1]), values)
    assert text.count('custom_call_target="TopK"') >= 2
    assert " sort(" not in text
