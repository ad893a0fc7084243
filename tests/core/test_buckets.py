"""The bucket table is closed, small, and covers every plan the limits allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.buckets import (
    STEP_COST_TOKENS,
    Bucket,
    bucket_table,
    first_bucket,
    pick_bucket,
    prefill_budget,
    prefill_sizes,
)

ROWS = st.integers(1, 1024)
TOKENS = st.integers(1, 1 << 14)


def names(table: tuple[Bucket, ...]) -> list[str]:
    return [bucket.name for bucket in table]


def test_the_default_table():
    assert names(bucket_table(16, 512)) == [
        "decode1", "decode4", "decode16", "mixed16+16", "mixed16+32", "mixed16+64", "mixed16+128",
        "mixed16+256", "mixed16+512",
    ]  # fmt: skip


def test_sizes_of_a_mixed_bucket():
    bucket = bucket_table(16, 512)[-1]
    assert (bucket.prefill_rows, bucket.num_rows, bucket.num_tokens) == (8, 24, 528)


def test_b54_largest_bucket_covers_an_odd_limit():
    table = bucket_table(6, 317)
    assert names(table) == [
        "decode1", "decode4", "decode6", "mixed6+16", "mixed6+32", "mixed6+64", "mixed6+128",
        "mixed6+256", "mixed6+317",
    ]  # fmt: skip
    assert pick_bucket(table, 6, 1, 317).prefill_tokens == 317
    assert pick_bucket(table, 0, 6, 257).prefill_tokens == 317


@given(ROWS, TOKENS)
def test_b54_every_plan_within_the_limits_has_a_bucket(rows: int, tokens: int):
    table = bucket_table(rows, tokens)
    assert len(set(names(table))) == len(table) <= 20
    assert max(bucket.decode_rows for bucket in table) == rows
    assert max(bucket.prefill_tokens for bucket in table) == tokens
    largest = pick_bucket(table, rows, min(8, rows, tokens), tokens)
    assert largest == table[-1]


@given(ROWS, TOKENS, st.data())
def test_pick_is_the_smallest_that_fits(rows: int, tokens: int, data: st.DataObject):
    table = bucket_table(rows, tokens)
    decode = data.draw(st.integers(0, rows))
    prefill = data.draw(st.integers(0, tokens))
    prefill_rows = data.draw(st.integers(min(1, prefill), min(8, rows, prefill)))
    got = pick_bucket(table, decode, prefill_rows, prefill)
    assert got.decode_rows >= decode
    assert got.prefill_rows >= prefill_rows
    assert got.prefill_tokens >= prefill
    for other in table:
        if other.num_tokens < got.num_tokens:
            assert (
                other.decode_rows < decode
                or other.prefill_rows < prefill_rows
                or other.prefill_tokens < prefill
            )


def test_pick_rounds_up_to_what_is_loaded():
    table = bucket_table(16, 512)
    loaded = tuple(b for b in table if b.name in ("decode1", "mixed16+512"))
    assert pick_bucket(loaded, 1, 0, 0).name == "decode1"
    assert pick_bucket(loaded, 2, 0, 0).name == "mixed16+512"
    assert pick_bucket(loaded, 0, 1, 3).name == "mixed16+512"


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"17 decode rows.*decode1, decode4"):
        pick_bucket(bucket_table(16, 512), 17, 0, 0)


@pytest.mark.parametrize("limits", [(0, 16), (16, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, int]):
    with pytest.raises(ValueError, match="at least 1"):
        bucket_table(*limits)


def test_prefill_sizes_are_those_of_the_table():
    assert prefill_sizes(bucket_table(4, 317)) == (16, 32, 64, 128, 256, 317)


@pytest.mark.parametrize(
    ("limits", "first"),
    [
        ((16, 512), "mixed16+64"),
        ((4, 100), "mixed4+64"),
        ((4, 48), "mixed4+48"),
        ((2, 9), "mixed2+9"),
    ],
)
def test_the_first_bucket_takes_prompts_in_large_pieces(limits: tuple[int, int], first: str):
    assert first_bucket(bucket_table(*limits)).name == first


@pytest.mark.parametrize(
    ("wanted", "budget"),
    [(1, 1), (64, 64), (65, 65), (130, 130), (256, 256), (260, 256), (330, 256), (390, 390),
     (512, 512), (9000, 512)],
)  # fmt: skip
def test_prefill_budget_splits_only_where_it_saves_work(wanted: int, budget: int):
    assert prefill_budget((64, 128, 256, 512), wanted) == budget


@given(TOKENS, st.integers(1, 1 << 15))
def test_prefill_budget_never_costs_more_than_padding(tokens: int, wanted: int):
    sizes = prefill_sizes(bucket_table(8, tokens))

    def padded(count: int) -> int:
        return next(size for size in sizes if size >= count)

    budget = prefill_budget(sizes, wanted)
    assert 1 <= budget <= min(wanted, tokens)
    if budget < wanted <= tokens:
        assert budget in sizes
        split = padded(budget) + padded(wanted - budget) + STEP_COST_TOKENS
        assert split < padded(wanted)


def test_without_sizes_nothing_is_rounded():
    assert prefill_budget((), 77) == 77
