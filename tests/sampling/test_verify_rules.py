"""Speculation draws from the target's distribution, and does not if its rule is wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.eval.chi_square import goodness_of_fit
from jaxserve.eval.toy_model import constant_toy, random_toy, true_outputs
from jaxserve.eval.toy_rounds import PROPOSALS, run_rounds
from jaxserve.sampling.residual import CLASSIC, Rule, acceptance, residual
from jaxserve.sampling_params import SamplingParams

ROWS, DRAFTS, LENGTH = 25_000, 4, 3
TOY = random_toy(seed=1)
PLAIN = SamplingParams()
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=3,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    logit_bias={2: 0.7},
    min_tokens=1,
)
PLANTED = {
    "the ratio upside down": Rule(lambda q, p: jnp.minimum(1.0, p / q), residual),
    "the residual forgotten": Rule(acceptance, lambda q, p: q),
}


def rounds_of(toy, params, proposals, seed=0, rule=CLASSIC):
    return run_rounds(
        toy, params, proposals,
        rows=ROWS, num_drafts=DRAFTS, length=LENGTH, first_seed=seed, rule=rule,
    )  # fmt: skip


def p_value(params, proposals, chunks=1, rule=CLASSIC):
    """Of the outputs of all rows, against the products of the target's probabilities."""
    counts = np.zeros(TOY.vocab**LENGTH, np.int64)
    for chunk in range(chunks):
        outputs = rounds_of(TOY, params, proposals, chunk * ROWS, rule).outputs
        numbers = outputs @ TOY.vocab ** np.arange(LENGTH - 1, -1, -1)
        counts += np.bincount(numbers, minlength=len(counts))
    return goodness_of_fit(counts, true_outputs(TOY, params, LENGTH)).p_value


@pytest.mark.parametrize("proposals", PROPOSALS)
def test_b26_200_000_draws_follow_the_target(proposals):
    assert p_value(PLAIN, proposals, chunks=200_000 // ROWS) > 0.001


@pytest.mark.parametrize("proposals", PROPOSALS)
def test_b26_draws_follow_the_target_with_filters_penalties_bias_and_min_tokens(proposals):
    assert p_value(EVERYTHING, proposals) > 0.001


@pytest.mark.parametrize("rule", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_error_is_caught_by_the_same_check(rule):
    assert p_value(PLAIN, "classic", rule=rule) < 1e-9


def test_drafts_with_the_targets_noise_change_no_token():
    """Nor do drafts without noise: these outputs are those of a seed, however they are drafted."""
    for params in (PLAIN, EVERYTHING):
        outputs = [rounds_of(TOY, params, proposals).outputs for proposals in PROPOSALS]
        np.testing.assert_array_equal(outputs[0], outputs[2])
        assert (outputs[0] != outputs[1]).any()


Q, P = (0.2, 0.5, 0.3, 0.0), (0.6, 0.2, 0.2, 0.0)


@pytest.mark.parametrize(("proposals", "expected"), [("classic", 0.600), ("coupled", 0.57647)])
def test_the_worked_example_accepts_as_it_should(proposals, expected):
    result = rounds_of(constant_toy(Q, P), PLAIN, proposals)
    judged = result.accepted + result.rejected
    print(f"{proposals}: {result.acceptance:.4f} of {judged} drafts accepted")
    assert abs(result.acceptance - expected) < 4 * (0.25 / judged) ** 0.5 < 0.01


# Pairs whose drafts are accepted with a chance of 0.8: the sum of min(q, p); the chance of p's most
# likely token; and the sum of 1 / sum(max(q / q(x), p / p(x))), found by bisection.
A_CLASSIC = (0.5, 0.3, 0.1, 0.1), (0.3, 0.5, 0.1, 0.1)
A_ONE_HOT = (0.8, 0.1, 0.1, 0.0), (0.7, 0.1, 0.1, 0.1)


def coupled_acceptance(q, p):
    q, p = np.asarray(q), np.asarray(p)
    return sum(1 / np.maximum(q / q[x], p / p[x]).sum() for x in range(len(q)))


def a_coupled():
    q, low, high = np.array([0.4, 0.3, 0.2, 0.1]), 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        p = (1 - middle) * q + middle * q[::-1]
        low, high = (middle, high) if coupled_acceptance(q, p) > 0.8 else (low, middle)
    return q, p


@pytest.mark.parametrize(
    ("proposals", "pair"),
    [("classic", A_CLASSIC), ("one-hot", A_ONE_HOT), ("coupled", a_coupled())],
    ids=["classic", "one-hot", "coupled"],
)
def test_tokens_per_round_follow_the_formula(proposals, pair):
    expected = (1 - 0.8 ** (DRAFTS + 1)) / (1 - 0.8)
    assert round(expected, 2) == 3.36
    result = rounds_of(constant_toy(*pair), PLAIN, proposals)
    print(f"{proposals}: {result.tokens_per_round:.3f} tokens per round, expected {expected:.3f}")
    assert abs(result.tokens_per_round / expected - 1) < 0.02
