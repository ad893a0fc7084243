"""Estimates of step times: outliers, lines through what was measured, what a stream may wait."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.step_times import MAX_STALL, StepTimes, swap_is_cheaper

SIZES = (64, 128, 256, 512)


def measured(mixed: dict[int, float], decode: float = 10.0, rows: int = 8) -> StepTimes:
    times = StepTimes()
    times.observe(rows, 0, decode)
    for size, seconds in mixed.items():
        times.observe(rows, size, seconds)
    return times


def test_no_limit_while_nothing_is_measured_or_nobody_decodes():
    assert StepTimes().prefill_limit(8, SIZES) == 512
    assert StepTimes().prefill_limit(8, ()) == sys.maxsize
    times = measured({64: 100.0})
    assert times.prefill_limit(0, SIZES) == 512
    assert times.prefill_limit(8, ()) == sys.maxsize
    alone = StepTimes()
    alone.observe(0, 512, 100.0)  # prompts are known, decode steps are not
    assert alone.prefill_limit(8, SIZES) == 512


def test_the_largest_size_within_the_stall():
    slowest = 10.0 * MAX_STALL
    assert measured({64: 12, 128: 20, 256: slowest, 512: 40}).prefill_limit(8, SIZES) == 256
    assert measured({64: 12, 128: 20, 256: slowest + 1, 512: 40}).prefill_limit(8, SIZES) == 128


def test_never_less_than_the_smallest_size():
    assert measured({64: 1000}).prefill_limit(8, SIZES) == 64


def test_sizes_never_measured_lie_on_the_line():
    assert measured({64: 12.0, 128: 14.0}).prefill_limit(8, SIZES) == 256  # 18, and 26 for 512
    assert measured({64: 12.0, 512: 40.0}).prefill_limit(8, SIZES) == 256  # 24 between them
    assert measured({64: 12.5}).prefill_limit(8, SIZES) == 256  # 10 + 2.5 for each 64
    assert measured({512: 20.0}).prefill_limit(8, SIZES) == 512
    assert measured({128: 30.0, 256: 20.0}).prefill_limit(8, SIZES) == 512  # level, not falling


def test_prompts_that_ran_alone_are_a_first_guess():
    times = StepTimes()
    times.observe(8, 0, 10.0)
    for size in SIZES:
        times.observe(0, size, size / 16)
    assert times.prefill_limit(8, SIZES) == 128  # 10 + 8, and 10 + 16 for 256
    times.observe(8, 128, 12.0)  # with decoders it is cheaper than one after the other
    assert times.prefill_limit(8, SIZES) == 512


def test_rows_are_padded_to_size_classes():
    times = StepTimes()
    times.observe(5, 0, 10.0)
    times.observe(64, 0, 100.0)
    times.observe(64, 512, 100.0)
    times.observe(64, 64, 30.0)
    assert times.prefill_limit(7, SIZES) == 64
    assert times.prefill_limit(50, SIZES) == 512


def test_warm_up_and_outliers_change_nothing():
    times = measured({})
    for seconds in (500.0, 12.0):  # the first step of a shape is slow
        times.observe(8, 512, seconds)
    assert times.prefill_limit(8, SIZES) == 512
    for seconds in (12.0, 900.0, 12.0, 12.0, 900.0, 12.0):
        times.observe(8, 512, seconds)
        assert times.prefill_limit(8, SIZES) == 512


def test_estimates_follow_contexts_that_grow():
    times = measured({64: 12.0, 128: 14.0, 256: 18.0, 512: 24.0})
    assert times.prefill_limit(8, SIZES) == 512
    for _ in range(9):
        times.observe(8, 512, 40.0)
    assert times.prefill_limit(8, SIZES) == 256
    for _ in range(9):
        times.observe(8, 0, 16.0)
    assert times.prefill_limit(8, SIZES) == 512


def test_a_size_that_was_slow_once_is_tried_again_later():
    times = measured({64: 12.0, 128: 300.0})
    assert times.prefill_limit(8, (64, 128)) == 64
    for _ in range(600):
        times.observe(8, 64, 12.0)
        times.observe(8, 0, 10.0)
    assert times.prefill_limit(8, (64, 128)) == 128


@given(
    st.dictionaries(st.sampled_from(SIZES), st.floats(1e-6, 1e3), max_size=4),
    st.floats(1e-6, 1e3),
    st.integers(0, 300),
)
def test_the_limit_is_always_one_of_the_sizes(mixed: dict[int, float], decode: float, rows: int):
    assert measured(mixed, decode).prefill_limit(rows, SIZES) in SIZES


@pytest.mark.parametrize(("copy", "cheaper"), [(0.79, True), (0.81, False)])
def test_swapping_is_cheaper_when_two_copies_cost_less_than_the_prefill(copy: float, cheaper: bool):
    """A page of 16 tokens in each of 2 groups, 0.2 a token: 3.2 against 4 copies."""
    assert swap_is_cheaper(copy, 0.2, page_size=16, num_groups=2) is cheaper
    times = StepTimes()
    assert times.swap_is_cheaper(16, 2)  # nothing is known
    times.observe_copy(10, 10 * copy)
    assert times.swap_is_cheaper(16, 2)
    times.observe(0, 512, 512 * 0.2)
    assert times.swap_is_cheaper(16, 2) is cheaper
    times.observe_copy(0, 5.0)
    assert times.swap_is_cheaper(16, 2) is cheaper
