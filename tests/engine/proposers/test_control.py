"""Adaptive numbers of drafts: what pays is found, what does not is left, and trying is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.proposers.control import DraftControl
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.support.draft_simulation import (
    ROW_SIZES,
    WIDTHS,
    Profile,
    Simulation,
    arithmetic_bound,
    memory_bound,
    simulate,
)

STEPS = 1200


def bursts(_: int, progress: int) -> tuple[float, int]:
    """A quarter of the text is copied; elsewhere drafts are rare and wrong."""
    if progress // 150 % 4 == 1:
        return 0.97, 8
    return (0.1, 8) if progress % 5 == 0 else (0.0, 0)


PROFILES: dict[str, Profile] = {
    "hopeless": lambda i, progress: (0.05, 8),
    "good": lambda i, progress: (0.8, 8),
    "bursts": bursts,
    "changing": lambda i, progress: (0.9 if progress // 600 % 2 else 0.03, 8),
    "mixed": lambda i, progress: (0.9 if i % 4 == 0 else 0.1, 8),
}


def make_requests(rows: int) -> list[Request]:
    return [Request(str(i), (1,), SamplingParams(), max_tokens=99, seed=0) for i in range(rows)]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("cost", [memory_bound, arithmetic_bound])
@pytest.mark.parametrize("name", PROFILES)
def test_never_much_slower_than_plain_decode(name, cost, free):
    for rows in (1, 16):
        served = simulate(rows, PROFILES[name], cost, STEPS, free=free)
        assert served.slowdown < 1.03


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["good", "mixed", "changing", "bursts"])
def test_near_the_best_fixed_number_where_it_pays(name, rows):
    fixed = [
        simulate(rows, PROFILES[name], memory_bound, STEPS, most=k, adaptive=False).slowdown
        for k in (2, 4, 8)
    ]
    served = simulate(rows, PROFILES[name], memory_bound, STEPS)
    assert min(fixed) < 0.95
    assert served.slowdown < 1.07 * min(fixed)


def test_turns_off_where_it_loses_and_comes_back():
    control = DraftControl(WIDTHS, ROW_SIZES)
    rate = [0.9]
    served = Simulation(4, lambda i, progress: (rate[0], 8), memory_bound)
    served.run(control, 300)
    assert sum(width >= 5 for width in served.widths_used[-100:]) > 80
    rate[0] = 0.02
    served.run(control, 600)
    recent = served.widths_used[-300:]
    assert recent.count(1) > 270
    assert recent.count(1) < 300  # it keeps trying
    rate[0] = 0.9
    served.run(control, 600)
    assert sum(width >= 5 for width in served.widths_used[-100:]) > 80


def test_off_at_batch_sizes_where_drafts_cost_as_much_as_steps():
    served = simulate(64, PROFILES["good"], arithmetic_bound, 300)
    assert served.widths_used[-200:].count(1) > 190


def test_more_drafts_where_more_are_right():
    wide = simulate(1, PROFILES["good"], memory_bound, 400).widths_used[-100:]
    narrow = simulate(
        1, lambda i, progress: (0.35, 8), lambda rows, width: 1 + 0.15 * (width - 1), 400
    ).widths_used[-100:]
    assert sum(wide) / 100 > 7
    assert 1 < sum(narrow) / 100 < 3.5


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-1, 12), min_size=1, max_size=6),
            st.lists(st.integers(0, 12), min_size=6, max_size=6),
            st.floats(0.1, 20.0),
        ),
        max_size=40,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3]),
)
@settings(max_examples=100, deadline=None)
def test_never_more_than_allowed(steps, adaptive, free, disable):
    control = DraftControl(
        (1, 2, 4, 9),
        (1, 4),
        adaptive=adaptive,
        drafts_are_free=free,
        disable_by_batch_size=disable,
    )
    for most, right, seconds in steps:
        requests = make_requests(len(most))
        limits = control.limits(requests, most)
        assert all(
            0 <= limit <= max(allowed, 0) for limit, allowed in zip(limits, most, strict=True)
        )
        assert max(limits) <= 8
        if disable is not None and len(most) >= disable:
            assert not any(limits)
        width = control.width(requests, limits)
        assert width in (1, 2, 4, 9)
        if not any(limits):
            assert width == 1
        if not adaptive:
            assert width > max(limits)
        accepted = [min(a, limit, width - 1) for a, limit in zip(right, limits, strict=False)]
        for request, limit, good in zip(requests, limits, accepted, strict=True):
            control.observe(request.request_id, min(limit, width - 1), good)
        emitted = sum(accepted) + len(most)
        control.observe_step(len(most), width, seconds, emitted, drafting=any(limits))


def used_up(control: DraftControl, requests: list[Request]) -> None:
    """Drafts that cost two steps and bring nothing, until none are allowed any more."""
    for _ in range(8):
        control.observe_step(1, 1, 1.0, 1, drafting=False)
    while any(control.limits(requests, [8])):
        control.observe_step(1, 9, 2.0, 1, drafting=True)


def test_missed_drafts_that_were_right_bring_drafting_back_at_once():
    control = DraftControl(WIDTHS, ROW_SIZES)
    requests = make_requests(1)
    used_up(control, requests)
    control.observe_missed("0", 1, 8, 8)  # nine tokens for two steps
    assert control.limits(requests, [8]) == [8]


def test_missed_drafts_count_together_and_wrong_ones_against_them():
    control = DraftControl(WIDTHS, ROW_SIZES)
    requests = make_requests(1)
    used_up(control, requests)
    for _ in range(100):
        control.observe_missed("0", 1, 8, 3)  # would have gained two steps
        for _ in range(2):
            control.observe_missed("0", 1, 8, 0)  # would have lost one each
        assert control.limits(requests, [8]) == [0]
    control.observe_missed("0", 1, 8, 3)
    control.observe_missed("0", 1, 8, 3)
    assert control.limits(requests, [8]) == [8]


def test_missed_drafts_of_one_request_gain_little_for_many():
    control = DraftControl(WIDTHS, (4,))
    requests = make_requests(4)
    for _ in range(8):
        control.observe_step(4, 1, 1.0, 4, drafting=False)
    while any(control.limits(requests, [8] * 4)):
        control.observe_step(4, 9, 2.0, 4, drafting=True)
    control.observe_missed("0", 4, 8, 8)  # seven steps' worth, but of one request in four
    assert not any(control.limits(requests, [8] * 4))
    for name in "123":
        control.observe_missed(name, 4, 8, 8)
    assert control.limits(requests, [8] * 4) == [8] * 4


def test_missed_drafts_tell_of_acceptance_and_nothing_before_costs_are_known():
    control = DraftControl(WIDTHS, ROW_SIZES)
    before = control.acceptance.expected("0")[1]
    for _ in range(20):
        control.observe_missed("0", 1, 8, 8)
    assert control.acceptance.expected("0")[1] > before
    assert control.limits(make_requests(1), [8]) == [0]  # plain steps are not measured yet
    control.observe_missed("0", 1, 0, 0)


def test_steps_of_a_burst_count_each():
    control = DraftControl(WIDTHS, ROW_SIZES)
    requests = make_requests(1)
    control.observe_step(1, 1, 1.0, 1, drafting=False, steps=8)
    assert control.limits(requests, [8]) == [8]
    used_up(control, requests)
    control.observe_step(1, 1, 1.0, 1, drafting=False)  # the one after a step with drafts
    bursts = 0
    while not any(control.limits(requests, [8])):
        control.observe_step(1, 1, 1.0, 1, drafting=False, steps=8)
        bursts += 1
    assert 8 < bursts <= 32  # a plain step's time, at 0.0075 to 0.015 for each of 8


def test_plain_steps_come_first():
    control = DraftControl(WIDTHS, ROW_SIZES)
    requests = make_requests(1)
    for _ in range(8):
        assert control.limits(requests, [8]) == [0]
        control.observe_step(1, 1, 1.0, 1, drafting=False)
    assert control.limits(requests, [8]) == [8]
    assert control.limits(requests, [0]) == [0]
    assert control.limits(make_requests(2), [8, 8]) == [0, 0]  # another size: not measured yet


def test_fixed_numbers():
    control = DraftControl((1, 5), (4,), adaptive=False)
    requests = make_requests(3)
    assert control.limits(requests, [4, 0, 9]) == [4, 0, 4]
    assert control.width(requests, [0, 0, 0]) == 1
    assert control.width(requests, [0, 1, 0]) == 5


def test_a_slow_step_costs_no_more_than_the_account_bears():
    """An outlier among steps with drafts does not turn speculation off for long."""
    control = DraftControl(WIDTHS, ROW_SIZES)
    served = Simulation(1, PROFILES["good"], memory_bound).run(control, 200)
    control.observe_step(1, 9, 1000.0, 1, drafting=True)
    served.run(control, 100)
    assert sum(width >= 5 for width in served.widths_used[-100:]) > 80


def test_forget():
    control = DraftControl(WIDTHS, ROW_SIZES)
    control.observe("a", 2, 1)
    control.forget("a")
    control.forget("b")
    assert control.acceptance._own == {}


def test_widths_are_checked():
    for widths in ((), (2, 3), (1, 3, 2), (1, 1)):
        with pytest.raises(ValueError, match="ascending ones from 1 on"):
            DraftControl(widths, ROW_SIZES)
