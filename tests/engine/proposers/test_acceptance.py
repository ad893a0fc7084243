"""Acceptance estimates: measured per position, shared by those who have none of their own."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.proposers.acceptance import Acceptance, judge


def rates(acceptance: Acceptance, name: str) -> list[float]:
    expected = acceptance.expected(name)
    gains = [b - a for a, b in itertools.pairwise(expected)]
    return [gains[0], *[b / a for a, b in itertools.pairwise(gains)]]


def test_rates_are_learned_per_position():
    acceptance = Acceptance(4)
    for _ in range(100):
        acceptance.observe("a", 4, 2)  # always two, then one wrong
    first, second, third, _ = rates(acceptance, "a")
    assert min(first, second) > 0.9
    assert third < 0.1
    assert acceptance.expected("a")[0] == 1.0
    assert rates(acceptance, "new")[2] < 0.2  # others are expected to do alike


def test_a_request_has_rates_of_its_own():
    acceptance = Acceptance(4)
    for _ in range(30):
        for name in "bcdefgh":
            acceptance.observe(name, 4, 0)
        acceptance.observe("good", 4, 4)
    assert acceptance.expected("good")[4] > 3.5
    assert acceptance.expected("b")[4] < 1.2
    acceptance.forget("good")
    assert acceptance.expected("good")[4] < 2.0
    assert "good" not in acceptance._own
    assert "good" not in acceptance._expected


def test_better_at_one_position_is_expected_to_be_better_at_the_next():
    acceptance = Acceptance(4)
    for _ in range(60):
        acceptance.observe("a", 4, 1)
        acceptance.observe("b", 4, 0)
    before = rates(acceptance, "c")[1]
    for _ in range(10):
        acceptance.observe("c", 1, 1)  # only the first position is seen
    assert rates(acceptance, "c")[1] > before


def test_old_evidence_fades():
    acceptance = Acceptance(2)
    for _ in range(2000):  # so many that weights are scaled back
        acceptance.observe("a", 2, 0)
    for _ in range(12):
        acceptance.observe("a", 2, 2)
    assert 2.0 < acceptance.expected("a")[2] < 3.0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)), max_size=60)
)
@settings(max_examples=100, deadline=None)
def test_estimates_stay_within_what_is_possible(observations):
    acceptance = Acceptance(5)
    for name, drafted, accepted in observations:
        acceptance.observe(name, drafted, min(accepted, drafted))
    for name in "abc":
        expected = acceptance.expected(name)
        assert len(expected) == 6
        assert expected[0] == 1.0
        assert all(0 < b - a < 1 for a, b in itertools.pairwise(expected))


@pytest.mark.parametrize(
    ("proposed", "emitted", "result"),
    [
        ([1, 2, 3], [1, 2, 9], (3, 2)),
        ([1, 2, 3], [1], (1, 1)),  # a step without drafts tells about the first
        ([1, 2, 3], [4], (1, 0)),
        ([1], [1, 2, 3], (1, 1)),
        ([], [1], (0, 0)),
    ],
)
def test_new_tokens_tell_about_drafts_that_were_not_run(proposed, emitted, result):
    assert judge(proposed, emitted) == result
