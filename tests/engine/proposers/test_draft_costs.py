"""What steps with drafts cost: ratios to plain steps, outliers, widths never measured."""

import pytest

from jaxserve.engine.proposers.draft_costs import DraftCosts


def costs(plain: float = 10.0) -> DraftCosts:
    known = DraftCosts((1, 2, 3, 5, 9))
    for _ in range(10):
        known.observe(1, plain, drafting=False)
    return known


def measured(known: DraftCosts, **ratios: float) -> DraftCosts:
    for name, ratio in ratios.items():
        for _ in range(3):
            known.observe(int(name[1:]), ratio * 10.0, drafting=True)
    return known


def test_plain_steps_are_measured_first_and_again():
    known = DraftCosts((1, 2))
    for _ in range(8):
        assert not known.knows_plain()
        known.observe(1, 10.0, drafting=False)
    assert known.knows_plain()
    for _ in range(257):
        assert known.knows_plain()
        known.observe(2, 11.0, drafting=True)
    assert not known.knows_plain()
    known.observe(1, 99.0, drafting=False)  # the first one had to wait for the drafts before it
    for _ in range(4):
        assert not known.knows_plain()
        known.observe(1, 20.0, drafting=False)
    assert known.knows_plain()


def test_ratios_are_medians():
    known = costs()
    for seconds in (12.0, 12.0, 500.0, 12.0):
        known.observe(2, seconds, drafting=True)
    assert known.ratio(2) == pytest.approx(1.2)


def test_widths_never_measured_lie_on_the_line():
    assert [costs().ratio(w) for w in (1, 2, 9)] == [1.0, 1.0, 1.0]
    known = measured(costs(), w2=1.2)
    assert known.ratio(3) == pytest.approx(1.4)
    assert measured(known, w5=1.8).ratio(3) == pytest.approx(1.4)
    assert measured(costs(), w2=0.9).ratio(9) == pytest.approx(0.9)  # not falling
    assert measured(costs(), w2=0.9, w3=0.8).ratio(9) == pytest.approx(0.8)


def test_one_slow_sample_is_not_believed():
    known = costs()
    known.observe(2, 300.0, drafting=True)
    assert known.ratio(2) == 1.0
    assert not known.is_measured(2)
    known.observe(2, 300.0, drafting=True)
    assert known.ratio(2) == 30.0
    assert known.is_measured(2)


def test_one_step_wider_at_a_time():
    known = costs()
    assert known.candidates() == [2]
    assert measured(known, w2=1.1).candidates() == [2, 3]
    assert measured(known, w5=1.1).candidates() == [2, 3, 5, 9]


def test_nothing_is_learned_of_drafts_before_plain_steps_are_known():
    known = DraftCosts((1, 2))
    known.observe(2, 5.0, drafting=True)
    assert not known.is_measured(2)
