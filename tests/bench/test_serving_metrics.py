"""The numbers of a load run, computed by hand for made-up timings."""

import pytest

from jaxserve.bench.load_client import Chunk, Outcome
from jaxserve.bench.load_generator import LoadResult
from jaxserve.bench.serving_metrics import parse_slos, request_times, summarise
from jaxserve.errors import InvalidRequestError


def outcome(start: float, chunk_times: list[float], tokens: int, prompt: int = 10) -> Outcome:
    chunks = [Chunk(time, None) for time in chunk_times]
    return Outcome(start, chunk_times[-1], chunks, prompt, tokens)


FAILED = Outcome(100.0, error="broke off", chunks=[Chunk(100.5, None)], prompt_tokens=10)


def test_one_token_per_chunk():
    times = request_times(outcome(1.0, [1.5, 1.6, 1.8], tokens=3))
    assert times.ttft == pytest.approx(500)
    assert times.e2el == pytest.approx(800)
    assert times.tpot == pytest.approx(150)
    assert times.itl == pytest.approx([100, 200])


def test_two_tokens_per_chunk_halve_the_gaps():
    times = request_times(outcome(0.0, [1.0, 1.2, 1.6], tokens=6))
    assert times.itl == pytest.approx([100, 100, 200, 200])


def test_uneven_tokens_per_chunk_keep_the_number_of_gaps():
    """10 tokens in 4 chunks: 2.5 each, so 7.5 after the first; every gap is told 2 or 3 times."""
    times = request_times(outcome(0.0, [1.0, 2.0, 3.0, 4.0], tokens=10))
    assert times.itl == pytest.approx([400] * len(times.itl))
    assert len(times.itl) in (7, 8)


def test_fewer_tokens_than_chunks():
    """A server that splits a token over chunks (half characters): gaps grow, not shrink."""
    times = request_times(outcome(0.0, [1.0, 1.1, 1.2, 1.3], tokens=2))
    assert times.itl == pytest.approx([200])


def test_one_token_has_no_tpot():
    times = request_times(outcome(0.0, [0.2], tokens=1))
    assert (times.tpot, times.itl) == (None, [])


def test_summary():
    outcomes = [
        outcome(0.0, [1.0, 1.5], tokens=2),
        outcome(0.5, [1.0, 2.5], tokens=2, prompt=20),
        FAILED,
    ]
    slos = parse_slos(["ttft:600", "tpot:1500,e2el:2000"])
    summary = summarise(LoadResult(outcomes, 4.0), slos, percentiles=(50, 99))
    assert summary == {
        "completed": 2,
        "failed": 1,
        "duration": 4.0,
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "request_throughput": 0.5,
        "request_goodput": 0.25,
        "output_throughput": 1.0,
        "total_token_throughput": 8.5,
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 750.0,
        "median_ttft_ms": 750.0,
        "std_ttft_ms": 250.0,
        "p50_ttft_ms": 750.0,
        "p99_ttft_ms": 995.0,
        "mean_tpot_ms": 1000.0,
        "median_tpot_ms": 1000.0,
        "std_tpot_ms": 500.0,
        "p50_tpot_ms": 1000.0,
        "p99_tpot_ms": pytest.approx(1490.0),
        "mean_itl_ms": 1000.0,
        "median_itl_ms": 1000.0,
        "std_itl_ms": 500.0,
        "p50_itl_ms": 1000.0,
        "p99_itl_ms": pytest.approx(1490.0),
        "mean_e2el_ms": 1750.0,
        "median_e2el_ms": 1750.0,
        "std_e2el_ms": 250.0,
        "p50_e2el_ms": 1750.0,
        "p99_e2el_ms": 1995.0,
    }


def test_chosen_metrics_only():
    summary = summarise(LoadResult([outcome(0, [1.0], 1)], 1.0), None, ["ttft"], [95])
    assert [key for key in summary if key.endswith("_ms")] == [
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "p95_ttft_ms",
    ]
    assert summary["request_goodput"] is None


def test_all_failed():
    summary = summarise(LoadResult([FAILED], 1.0))
    assert (summary["completed"], summary["mean_ttft_ms"], summary["p99_itl_ms"]) == (0, None, None)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:3", "x:1", "foo"])
def test_goodput_limits_that_make_no_sense(text):
    with pytest.raises(InvalidRequestError, match="metric:milliseconds"):
        parse_slos([text])


def test_no_goodput_limits():
    assert parse_slos([]) is None
