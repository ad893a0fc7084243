"""Pearson's chi-square tests: do counts follow a distribution, or two samples the same one?"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jax.scipy.special import gammaincc

MIN_EXPECTED = 5.0  # rarer cells are judged together: the test's distribution needs so many


class ChiSquare(NamedTuple):
    """A test's outcome. Sums of independent statistics are tests again."""

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        """The chance of a statistic at least as large if there is no difference."""
        if self.degrees == 0:  # one cell alone
            return 1.0
        if self.statistic == np.inf:
            return 0.0
        return float(gammaincc(self.degrees / 2, self.statistic / 2))


def goodness_of_fit(counts: np.ndarray, probabilities: np.ndarray) -> ChiSquare:
    """Whether counts [N] are draws from probabilities [N]. A count where the probability is 0 makes
    the statistic infinite."""
    counts = np.asarray(counts, np.float64)
    expected = counts.sum() * np.asarray(probabilities, np.float64)
    if counts[expected == 0.0].any():
        return ChiSquare(np.inf, 1)
    observed, expected = _pooled(np.stack([counts, expected]), expected)
    return ChiSquare(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def two_samples(first: np.ndarray, second: np.ndarray) -> ChiSquare:
    """Whether counts [N] of two samples, of any sizes, come from the same distribution."""
    both = np.stack([first, second]).astype(np.float64)
    sizes = both.sum(axis=1, keepdims=True)
    if not sizes.all():
        raise ValueError(f"two samples need draws, got {sizes[0, 0]:g} and {sizes[1, 0]:g}")
    share = sizes / sizes.sum()
    both = _pooled(both, both.sum(axis=0) * share.min())
    expected = both.sum(axis=0) * share
    return ChiSquare(float(((both - expected) ** 2 / expected).sum()), both.shape[1] - 1)


def together(tests: Iterable[ChiSquare]) -> ChiSquare:
    """Independent tests as one."""
    tests = list(tests)
    return ChiSquare(sum(t.statistic for t in tests), sum(t.degrees for t in tests))


def _pooled(cells: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Columns of cells [K, N], the rare ones added up; if these are rare even so, they go to the
    rarest of the others. Columns in which nothing can be are dropped."""
    rare = expected < MIN_EXPECTED
    if rare.all():
        return cells.sum(axis=1, keepdims=True)
    kept = cells[:, ~rare]
    rest = cells[:, rare].sum(axis=1, keepdims=True)
    if expected[rare].sum() >= MIN_EXPECTED:
        return np.concatenate([kept, rest], axis=1)
    kept[:, np.argmin(expected[~rare])] += rest[:, 0]
    return kept
