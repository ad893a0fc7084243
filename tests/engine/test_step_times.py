"""Estimates of step times: outliers, lines through what was measured, what a stream may wait."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.step_times import DEFAULT_MAX_STALL, StepTimes, swap_is_cheaper

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
    slowest = 10.0 * DEFAULT_MAX_STALL
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


def with_attention(pair: float, *, base: float = 14.0) -> StepTimes:
    """Decode steps take 10, mixed ones base + size / 16, and `pair` for each pair of tokens."""
    times = measured({size: base + size / 16 for size in SIZES})
    for _ in range(9):
        times.observe(8, 64, base + 4 + pair * 64 * 3000, 64 * 3000)
    return times


def test_the_first_step_with_decoders_is_small_and_tells_about_larger_ones():
    times = measured({})
    assert times.prefill_limit(8, SIZES) == 64
    times.observe(8, 64, 12.0, 64 * 32)
    assert times.prefill_limit(8, SIZES) == 256


def test_attention_to_a_long_context_leaves_fewer_tokens():
    pair = 1e-4
    times = with_attention(pair)
    assert times.prefill_limit(8, SIZES) == 128  # 14 + 8
    assert times.prefill_limit(8, SIZES, context=100) == 128  # 22 + 1.3
    for context in (500, 1000, 2000, 4000):
        tokens = times.prefill_limit(8, SIZES, context)
        size = next(size for size in SIZES if size >= tokens)
        slowest = 10 * DEFAULT_MAX_STALL
        assert 14 + size / 16 + pair * context * tokens <= slowest
        assert 14 + size / 16 + pair * context * (tokens + 1) > slowest - 1e-6 or tokens == size
    assert times.prefill_limit(8, SIZES, 50_000) == 4  # a prompt goes on, whatever it takes
    assert times.prefill_limit(0, SIZES, 50_000) == 512


def test_where_the_smallest_shape_is_too_slow_attention_may_add_a_quarter():
    times = with_attention(1e-3, base=96.0)  # 100 for 64 tokens, where 25 would be allowed
    assert times.prefill_limit(8, SIZES) == 256  # 112; 512 would take 128
    assert times.prefill_limit(8, SIZES, context=1000) == 25


def test_steps_with_long_contexts_say_nothing_about_short_ones():
    times = with_attention(1e-4)
    short = times.prefill_limit(8, SIZES)
    for _ in range(20):
        times.observe(8, 128, 14 + 8 + 1e-4 * 128 * 6000, 128 * 6000)
    assert times.prefill_limit(8, SIZES) == short
    for _ in range(20):  # a kernel that grows worse with the context is noticed
        times.observe(8, 64, 14 + 4 + 2e-4 * 64 * 6000, 64 * 6000)
    assert times.prefill_limit(8, SIZES, 2000) < with_attention(1e-4).prefill_limit(8, SIZES, 2000)


def test_without_a_limit_prompts_take_what_there_is() -> None:
    times = StepTimes(max_stall=0)
    times.observe(8, 0, 0.01)
    times.observe(8, 64, 5.0)
    assert times.prefill_limit(8, SIZES) == SIZES[-1]
