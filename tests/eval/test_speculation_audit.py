"""The audit says yes to the rule that is right, and no to those that are not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.eval.chi_square import ChiSquare, goodness_of_fit, together, two_samples
from jaxserve.eval.speculation_audit import (
    SETTINGS,
    classic_outcome,
    coupled_outcome,
    exact_checks,
    one_hot_outcome,
    speculative_outputs,
)
from jaxserve.eval.toy_model import random_toy, true_outputs, true_probabilities
from jaxserve.sampling.residual import Rule, acceptance, residual
from jaxserve.sampling_params import SamplingParams

Q, P = np.array([[0.2, 0.5, 0.3]]), np.array([[0.6, 0.2, 0.2]])


def test_the_right_rule_passes_exactly():
    checks = exact_checks()
    assert [check.name.split()[0] for check in checks] == ["one-hot", "classic", "coupled"]
    assert all(check.passed for check in checks), checks
    assert max(check.value for check in checks) < 1e-6


TINY = 1e-30  # no division by 0
PLANTED = {
    "the ratio upside down": Rule(lambda q, p: jnp.minimum(1.0, p / (q + TINY)), residual),
    "everything accepted": Rule(lambda q, p: jnp.ones_like(q), residual),
    "a little too much accepted": Rule(
        lambda q, p: jnp.minimum(1.0, 1.001 * q / (p + TINY)), residual
    ),
    "nothing accepted": Rule(lambda q, p: jnp.zeros_like(q), residual),
    "the residual forgotten": Rule(acceptance, lambda q, p: q),
    "the residual of the drafts": Rule(acceptance, lambda q, p: jnp.maximum(p - q, 0.0)),
    "drafts drawn again": Rule(acceptance, lambda q, p: p),
}


@pytest.mark.parametrize("rule", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_error_is_caught(rule):
    one_hot, classic, coupled = exact_checks(rule=rule)
    assert not classic.passed
    assert classic.value > 3e-5
    assert one_hot.passed
    assert coupled.passed


def test_a_rule_that_gives_no_numbers_is_caught():
    rule = Rule(lambda q, p: q / jnp.zeros_like(p), residual)
    assert not exact_checks(rule=rule)[1].passed


def test_outcomes_of_the_worked_example():
    accepted, rejected = classic_outcome(Q, P)
    np.testing.assert_allclose(accepted, [[0.2, 0.2, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(rejected, [[0.0, 0.3, 0.1]], rtol=1e-6, atol=1e-7)
    accepted, rejected = coupled_outcome(Q, P)
    np.testing.assert_allclose(accepted, [[1 / 5, 1 / 5, 3 / 17]], rtol=1e-6)
    np.testing.assert_allclose(accepted + rejected, Q)
    accepted, rejected = one_hot_outcome(Q, P)
    np.testing.assert_allclose(accepted, [[0.2, 0.0, 0.0]])
    np.testing.assert_allclose(accepted + rejected, Q)


def test_coupled_outcomes_are_those_of_races_with_the_same_noise():
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(200_000, 3))
    first, second = (np.argmax(np.log(side) + noise, axis=1) for side in (Q[0], P[0]))
    shares = np.bincount(first[first == second], minlength=3) / len(noise)
    np.testing.assert_allclose(shares, coupled_outcome(Q, P)[0][0], atol=0.004)


def test_outputs_are_sums_over_all_ways_of_making_them():
    """Two tokens and one draft, by hand: accepted and bonus, or rejected and a new round."""
    accepted, rejected = np.array([0.1, 0.2]), np.array([0.3, 0.4])
    q = [np.array([[0.25, 0.75]]), np.array([[0.5, 0.5], [0.125, 0.875]])]
    found = speculative_outputs(
        q, q, 1, lambda q, p: (np.tile(accepted, (len(q), 1)), np.tile(rejected, (len(q), 1)))
    )
    after_draft = accepted[:, None] * q[1]
    after_rejection = rejected[:, None] * (accepted + rejected)
    np.testing.assert_allclose(found, (after_draft + after_rejection).reshape(-1))


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_true_outputs_are_a_distribution(params):
    shares = true_outputs(random_toy(), params, 3)
    assert shares.shape == (64,)
    assert shares.sum() == pytest.approx(1.0)
    assert (shares > 0).sum() > 5


def test_true_probabilities_know_the_text():
    toy = random_toy()
    plain = true_probabilities(toy, SamplingParams(), [1, 2])
    bare = np.exp(toy.target[1 * 4 + 2].astype(np.float64))
    np.testing.assert_allclose(plain, bare / bare.sum())
    held = true_probabilities(toy, SamplingParams(min_tokens=3), [1, 2])
    assert held[0] == 0.0
    assert true_probabilities(toy, SamplingParams(min_tokens=2), [1, 2])[0] == plain[0]
    tired = true_probabilities(toy, SamplingParams(frequency_penalty=1.0), [1, 1, 2])
    np.testing.assert_allclose(tired[1] / tired[0], plain[1] / plain[0] * np.exp(-2.0))


def test_chi_square_against_known_values():
    """10, 20 and 30 of 60 against a third each; tables give p = 0.00674 for 10 at 2."""
    test = goodness_of_fit(np.array([10, 20, 30]), np.ones(3) / 3)
    assert test == ChiSquare(pytest.approx(10.0), 2)
    assert test.p_value == pytest.approx(0.0067379, rel=1e-4)
    two = two_samples(np.array([10, 20, 30]), np.array([30, 20, 10]))
    assert two == ChiSquare(pytest.approx(20.0), 2)
    assert together([test, two]) == ChiSquare(pytest.approx(30.0), 4)
    assert goodness_of_fit(np.array([1, 0]), np.array([0.0, 1.0])).p_value == 0.0
    assert two_samples(np.array([7, 0]), np.array([9, 0])).p_value == 1.0
    with pytest.raises(ValueError, match="got 0 and 3"):
        two_samples(np.zeros(2), np.array([1, 2]))


def test_p_values_are_uniform_where_there_is_no_difference():
    """Of both tests, also with many rare cells, which are judged together."""
    rng = np.random.default_rng(1)
    shares = np.array([0.5, 0.3, 0.15, *[0.05 / 40] * 40])
    fits, pairs = [], []
    for _ in range(400):
        first, second = rng.multinomial(500, shares), rng.multinomial(900, shares)
        fits.append(goodness_of_fit(first, shares).p_value)
        pairs.append(two_samples(first, second).p_value)
    for values in (fits, pairs):
        assert 0.44 < np.mean(values) < 0.56
        assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09
