"""The builder against a slow loop over rows and tokens, and the edges of every sampling field."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.buckets import Bucket, bucket_table, pick_bucket
from jaxserve.core.step_batch import MAX_SUPPRESS_IDS, StepBatch, resolve_previous
from jaxserve.engine.batch_builder import InDraw, build_batch, build_sampling, plan_rows
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request
from jaxserve.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from tests.support.scheduler_harness import LIMITS, Harness
from tests.support.scheduler_harness import make_request as make_queued_request

PAGE_SIZE = 4
PAGES_PER_ROW = 12
TABLE = bucket_table(4, 96)


def make_request(num_prompt: int, num_output: int = 0, **changes: object) -> Request:
    params = changes.pop("params", SamplingParams())
    request = Request("r", tuple(range(100, 100 + num_prompt)), params, 16, 0, (2,), **changes)
    request.output_token_ids = list(range(500, 500 + num_output))
    return request


def one_row(request: Request) -> Plan:
    """A plan that runs all of the request's tokens as one prefill chunk."""
    return Plan(prefill=(Scheduled(request, 0, request.num_tokens, True),))


def build(plan: Plan, bucket: Bucket, num_groups: int = 2, **more: object) -> StepBatch:
    return build_batch(
        plan, bucket, num_groups=num_groups, pages_per_row=PAGES_PER_ROW, page_size=PAGE_SIZE,
        **more,
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to four rows with random lengths, chunks and pages (not the same in both groups)."""
    decode, prefill = [], []
    for _ in range(draw(st.integers(0, 4))):
        request = make_request(draw(st.integers(1, 20)), draw(st.integers(0, 20)))
        request.pages = tuple(
            draw(st.lists(st.integers(1, 99), min_size=10, max_size=12)) for _ in range(2)
        )
        start = draw(st.integers(0, request.num_tokens - 1))
        size = draw(st.integers(1, min(24, request.num_tokens - start)))
        samples = start + size == request.num_tokens
        row = Scheduled(request, start, size, samples)
        (decode if size == 1 and samples else prefill).append(row)
    return Plan(tuple(decode), tuple(prefill))


@settings(max_examples=150, deadline=None)
@given(plans(), st.booleans())
def test_b54_batch_equals_the_slow_loop_and_padding_is_inert(plan: Plan, largest: bool):
    smallest = pick_bucket(TABLE, len(plan.decode), len(plan.prefill), plan.num_prefill_tokens)
    bucket = TABLE[-1] if largest else smallest
    R, T = bucket.num_rows, bucket.num_tokens
    batch = build(plan, bucket)

    tokens, positions, rows, slots = [0] * T, [0] * T, [R] * T, [[-1] * T, [-1] * T]
    lens, kv_lens, sample_at = [0] * R, [0] * R, [[0]] * R
    starts = list(range(bucket.decode_rows)) + [bucket.decode_rows] * bucket.prefill_rows
    page_table = np.zeros((2, R, PAGES_PER_ROW), int)
    flat = bucket.decode_rows
    numbered = [*enumerate(plan.decode), *enumerate(plan.prefill, bucket.decode_rows)]
    for row, item in numbered:
        if row < bucket.decode_rows:
            at = row
        else:
            at, flat = flat, flat + item.num_tokens
        starts[row], lens[row] = at, item.num_tokens
        kv_lens[row] = item.start + item.num_tokens
        for group in range(2):
            for index, page in enumerate(item.request.pages[group]):
                page_table[group, row, index] = page
        all_tokens = [*item.request.prompt_token_ids, *item.request.output_token_ids]
        for offset in range(item.num_tokens):
            position = item.start + offset
            tokens[at + offset], positions[at + offset] = all_tokens[position], position
            rows[at + offset] = row
            for group, pages in enumerate(item.request.pages):
                page = pages[position // PAGE_SIZE]
                slots[group][at + offset] = page * PAGE_SIZE + position % PAGE_SIZE
        if item.samples:
            sample_at[row] = [at + item.num_tokens - 1]

    expected = {
        "tokens": tokens, "positions": positions, "row_of_token": rows, "prev_row": [-1] * T,
        "write_slot": slots, "query_starts": starts, "query_lens": lens, "kv_lens": kv_lens,
        "page_table": page_table, "adapter_slot": [0] * R, "state_slot": [0] * R,
        "sample_at": sample_at,
    }  # fmt: skip
    for name, value in expected.items():
        got = getattr(batch, name)
        assert got.dtype == np.int32, name
        np.testing.assert_array_equal(got, value, err_msg=name)
    assert (batch.decode_rows, batch.width) == (bucket.decode_rows, 1)
    assert (batch.num_rows, batch.num_tokens) == (R, T)

    sampling = build_sampling(plan, bucket)
    active = {row for row, item in numbered if item.samples}
    assert set(np.flatnonzero(sampling.active)) == active
    for row, item in numbered:
        want = item.start + item.num_tokens if item.samples else 0
        assert sampling.positions[row, 0] == want
    assert plan_rows(plan, bucket) == numbered


def test_the_empty_plan_is_all_padding():
    for bucket in TABLE:
        batch, sampling = build(Plan(), bucket), build_sampling(Plan(), bucket)
        assert not batch.query_lens.any()
        assert (batch.write_slot == -1).all()
        assert (batch.row_of_token == bucket.num_rows).all()
        assert (batch.query_starts < bucket.num_tokens).all()
        assert not sampling.active.any()
        assert not sampling.temperature.any()
        assert (sampling.top_p == 1).all()
        assert (sampling.repetition_penalty == 1).all()
        assert (sampling.num_logprobs == -1).all()


def test_rows_that_do_not_sample_keep_the_padding_of_the_sampler():
    request = make_request(20, params=SamplingParams(temperature=0.7, logit_bias={3: 1.0}))
    request.pages = ([1, 2, 3, 4, 5],)
    chunk = Plan(prefill=(Scheduled(request, 0, 8, False),))
    idle, inner = build_sampling(Plan(), TABLE[-1]), build_sampling(chunk, TABLE[-1])
    for field in fields(idle):
        np.testing.assert_array_equal(getattr(inner, field.name), getattr(idle, field.name))


def test_every_step_has_arrays_of_its_own():
    request = make_request(3)
    request.pages = ([1], [1])
    plan = one_row(request)
    for builder in (build, build_sampling):
        first, second = builder(plan, TABLE[-1]), builder(plan, TABLE[-1])
        ours = [v for v in vars(first).values() if isinstance(v, np.ndarray)]
        theirs = [v for v in vars(second).values() if isinstance(v, np.ndarray)]
        assert len(ours) >= 12
        assert not any(np.shares_memory(a, b) for a in ours for b in theirs)
        assert all(array.flags.c_contiguous for array in ours)


# ---------------------------------------------------------------- sampling fields


def sampling_row(request: Request) -> dict[str, np.ndarray]:
    """The SamplingBatch row of a request about to draw, between two others."""
    other = make_request(2, params=SamplingParams(temperature=0.0))
    plan = Plan(prefill=tuple(one_row(r).prefill[0] for r in (other, request, other)))
    bucket = pick_bucket(TABLE, 0, 3, plan.num_prefill_tokens)
    batch = build_sampling(plan, bucket)
    row = bucket.decode_rows + 1
    assert batch.active[row]
    return {field.name: getattr(batch, field.name)[row] for field in fields(batch)}


def test_settings_reach_their_arrays():
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.25,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias={9: -100.0, 4: 2.5}, logprobs=3,
    )  # fmt: skip
    got = sampling_row(make_request(5, 2, params=params, choice=2, sampling_slot=6))
    expected = {
        "temperature": (0.5, np.float32), "top_k": (7, np.int32), "top_p": (0.9, np.float32),
        "min_p": (0.1, np.float32), "repetition_penalty": (1.25, np.float32),
        "presence_penalty": (-0.5, np.float32), "frequency_penalty": (0.75, np.float32),
        "choice": (2, np.int32), "slot": (6, np.int32), "num_logprobs": (3, np.int32),
    }  # fmt: skip
    for name, (value, dtype) in expected.items():
        assert got[name].dtype == dtype, name
        assert got[name] == dtype(value), name
    assert got["positions"].tolist() == [7]
    assert got["bias_ids"].shape == got["bias_values"].shape == (MAX_LOGIT_BIAS,)
    assert got["bias_ids"][:3].tolist() == [9, 4, -1]
    assert got["bias_values"][:3].tolist() == [-100.0, 2.5, 0.0]
    assert (got["bias_ids"][3:] == -1).all()


def test_a_full_logit_bias_fits():
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    got = sampling_row(make_request(3, params=SamplingParams(logit_bias=bias)))
    assert got["bias_ids"].tolist() == list(range(MAX_LOGIT_BIAS))


@pytest.mark.parametrize(
    ("top_k", "expected"), [(0, 0), (-1, 0), (1, 1), (2**31 - 1, 2**31 - 1), (2**40, 2**31 - 1)]
)
def test_b32_top_k_edges(top_k: int, expected: int):
    assert sampling_row(make_request(3, params=SamplingParams(top_k=top_k)))["top_k"] == expected


@pytest.mark.parametrize(("logprobs", "expected"), [(None, -1), (0, 0), (20, 20)])
def test_logprobs_not_asked_for_is_not_zero(logprobs: int | None, expected: int):
    got = sampling_row(make_request(3, params=SamplingParams(logprobs=logprobs)))
    assert got["num_logprobs"] == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, -(2**32) - 5, 2**63 - 1, -(2**63), 2**64 - 1])
def test_seed_words_are_the_twos_complement(seed: int):
    got = sampling_row(replace(make_request(3), seed=seed))
    low, high = (int(word) for word in got["seed"])
    assert got["seed"].dtype == np.uint32
    assert (high << 32 | low) == seed % 2**64


@pytest.mark.parametrize(("ignore_eos", "ids"), [(False, [2, 8, 9]), (True, [8, 2, 9])])
def test_what_would_end_the_request_is_suppressed_until_min_tokens(ignore_eos: bool, ids: list):
    params = SamplingParams(
        min_tokens=3, max_tokens=9, stop_token_ids=(8, 2, 9), ignore_eos=ignore_eos
    )
    for num_output in range(5):
        got = sampling_row(make_request(5, num_output, params=params))
        position = got["positions"][0]
        assert position == 5 + num_output
        suppressed = got["suppress_ids"][got["suppress_ids"] >= 0].tolist()
        if num_output < 3:
            assert suppressed == ids
            assert position < got["suppress_until"] == 8
        else:
            assert suppressed == []
            assert position >= got["suppress_until"]


def test_suppression_holds_the_most_ids_a_request_may_have():
    stops = tuple(range(1000, 1048))
    request = make_request(3, params=SamplingParams(min_tokens=1, stop_token_ids=stops))
    request.eos_token_ids = tuple(range(16))
    got = sampling_row(request)
    assert got["suppress_ids"].tolist() == [*range(16), *stops]
    assert len(got["suppress_ids"]) == MAX_SUPPRESS_IDS


def test_huge_min_tokens_do_not_overflow():
    params = SamplingParams(min_tokens=2**40, max_tokens=None)
    assert sampling_row(make_request(3, params=params))["suppress_until"] == 2**31 - 1


# ---------------------------------------------------------------- tokens still being drawn


def test_tokens_in_flight_resolve_on_the_device_to_what_the_host_would_have_sent():
    """Step 2 is built before step 1's tokens are known; with them it equals the known batch."""
    harness = Harness(LIMITS, page_size=PAGE_SIZE)
    harness.add(*(make_queued_request(name, size, 8) for name, size in (("a", 4), ("b", 7))))
    first = harness.schedule()
    bucket = TABLE[-1]
    previous = {item.request.request_id: InDraw(row, 1) for row, item in plan_rows(first, bucket)}
    assert previous == {"a": (4, 1), "b": (5, 1)}
    second = harness.schedule()
    assert [item.start for item in second.decode] == [4, 7]
    early = build(second, bucket, previous_rows=previous)
    assert (early.prev_row[:4] == [4, 5, -1, -1]).all()
    assert (early.write_slot == -1).all()

    drawn = {"a": [31], "b": [17]}
    harness.scheduler.commit(first, drawn)
    known = build(second, bucket)
    assert known.tokens[:2].tolist() == [31, 17]
    last_tokens = np.zeros((bucket.num_rows, 1), np.int32)
    for name, tokens in drawn.items():
        last_tokens[previous[name].row] = tokens
    accepted = np.zeros(bucket.num_rows, np.int32)
    resolved = resolve_previous(early, last_tokens, accepted, PAGE_SIZE)
    for field in fields(known):
        if field.name != "prev_row":
            np.testing.assert_array_equal(
                getattr(resolved, field.name), getattr(known, field.name), err_msg=field.name
            )


def test_a_token_in_flight_without_its_row_is_a_bug():
    request = make_request(3)
    request.pages = ([1], [1])
    plan = Plan(decode=(Scheduled(request, 3, 1, True),))
    with pytest.raises(AssertionError, match="previous row"):
        build(plan, TABLE[0])
