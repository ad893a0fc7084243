"""Draws follow the distribution: chi-square tests with fixed seeds, each at p > 0.001."""

import numpy as np
import pytest

from tests.support.sampling_runs import run

LOGITS = np.array([1.0, 0.0, -0.5, 2.0], np.float32)
COUNT = 20_000
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 9: 27.88}  # of chi-square at p = 0.001


def share(logits, temperature=1.0):
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    return weights / weights.sum()


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def tokens_of(*rows):
    """COUNT tokens for each of four rows of settings, at successive positions."""
    logits = np.broadcast_to(LOGITS, (len(rows), COUNT, len(LOGITS)))
    return run(logits, *rows)[0].tokens


@pytest.fixture(scope="module")
def plain():
    return tokens_of(
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "choice": 1},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 2.0, "seed": 1},
    )


@pytest.mark.parametrize("row", range(4))
def test_draws_follow_the_softmax(plain, row):
    counts = np.bincount(plain[row], minlength=4)
    expected = COUNT * share(LOGITS, 2.0 if row == 3 else 1.0)
    assert chi_square(counts, expected) < CRITICAL[3]


FILTERED = [
    ({"temperature": 0.7, "top_k": 3}, [0, 1, 3]),
    ({"temperature": 1.0, "top_p": 0.8}, [0, 3]),
    ({"temperature": 1.0, "min_p": 0.1}, [0, 1, 3]),
    ({"temperature": 1.5, "top_k": 3, "top_p": 0.85, "min_p": 0.01}, [0, 3]),
]


def test_filtered_draws_follow_what_the_filters_leave():
    tokens = tokens_of(*[{**row, "seed": 3 + place} for place, (row, _) in enumerate(FILTERED)])
    for drawn, (row, left) in zip(tokens, FILTERED, strict=True):
        counts = np.bincount(drawn, minlength=4)
        assert set(np.flatnonzero(counts).tolist()) == set(left)
        expected = COUNT * share(LOGITS[left], row["temperature"])
        assert chi_square(counts[left], expected) < CRITICAL[len(left) - 1]


def independent(first, second):
    table = np.zeros((4, 4))
    np.add.at(table, (first, second), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return chi_square(table, expected) < CRITICAL[9]


def test_positions_choices_and_seeds_are_independent(plain):
    assert independent(plain[0, :-1], plain[0, 1:])
    assert independent(plain[0], plain[1])
    assert independent(plain[0], plain[2])
    assert not independent(plain[0], plain[3])  # the same noise at another temperature


def test_draws_differ_between_positions_choices_and_seeds(plain):
    assert len({row.tobytes() for row in plain}) == 4
    assert len(set(plain[0].tolist())) == 4
