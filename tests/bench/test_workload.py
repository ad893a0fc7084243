"""The prompts and the arrival times of a benchmark."""

import itertools
import json
import math
import statistics

import pytest

from jaxserve.bench.arrivals import Arrivals
from jaxserve.bench.sampling import BenchSampling
from jaxserve.bench.workload import BenchRequest, RandomWorkload, read_dataset
from jaxserve.errors import InvalidRequestError


def test_random_prompts_have_exact_lengths_and_are_repeatable():
    workload = RandomWorkload(5, 128, 64, vocab_size=32_000, seed=3)
    requests = workload.requests()
    assert [request.prompt_tokens for request in requests] == [128] * 5
    assert {request.max_tokens for request in requests} == {64}
    assert all(256 <= i < 32_000 for request in requests for i in request.token_ids or ())
    assert workload.requests() == requests
    assert workload.requests(1) != requests
    assert RandomWorkload(5, 128, 64, vocab_size=32_000, seed=4).requests() != requests


def test_random_lengths_spread():
    requests = RandomWorkload(500, 100, 50, 1000, seed=0, range_ratio=0.2).requests()
    inputs = [request.prompt_tokens or 0 for request in requests]
    assert (min(inputs), max(inputs)) == (80, 120)
    assert (min(r.max_tokens for r in requests), max(r.max_tokens for r in requests)) == (40, 60)


def test_tiny_vocabularies_are_used_whole():
    requests = RandomWorkload(50, 20, 1, vocab_size=8, seed=0).requests()
    assert {i for request in requests for i in request.token_ids or ()} == set(range(8))


def test_random_text():
    (request,) = RandomWorkload(1, 20, 1, 1000, seed=0).requests(as_text=True)
    assert request.prompt_tokens is None
    assert len((request.text or "").split()) == 20


ROWS = [
    {"prompt": "hello", "max_tokens": 7},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"conversations": [{"from": "human", "value": "turn 1"}, {"from": "gpt", "value": "no"}]},
]
WANTED = {
    BenchRequest(7, text="hello"),
    BenchRequest(128, text="turn 1"),
}


@pytest.mark.parametrize("as_list", [False, True])
def test_dataset_rows_of_every_kind(tmp_path, as_list):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(ROWS) if as_list else "\n\n".join(map(json.dumps, ROWS)))
    requests = read_dataset(path, 3, None, seed=0)
    assert {request for request in requests if request.messages is None} == WANTED
    (talk,) = [request.messages for request in requests if request.messages is not None]
    assert talk == ({"role": "user", "content": "hi"},)
    assert read_dataset(path, 3, None, seed=0) == requests
    assert len(read_dataset(path, 10, None, seed=0)) == 10
    assert {request.max_tokens for request in read_dataset(path, 3, 9, seed=0)} == {9}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no rows"),
        ("{", "is not JSON"),
        ("[1, 2", "is not JSON"),
        ("\xff\xfe", "row 1"),
        ('{"prompt": ""}', "row 1 has no"),
        ('{"prompt": "a"}\n{"conversations": []}', "row 2 has no"),
        ('{"messages": ["a"]}', "row 1 has no"),
        ('{"prompt": "a", "max_tokens": true}', "row 1: max_tokens"),
        ('["a"]', "row 1 has no"),
    ],
)
def test_damaged_datasets_name_the_row(tmp_path, content, reason):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(content) if "\xff" in content else content)
    with pytest.raises(InvalidRequestError, match=reason):
        read_dataset(path, 1, None, seed=0)


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_dataset(tmp_path / "none", 1, None, seed=0)


def test_all_at_once():
    assert Arrivals().send_times(4, seed=0) == [0, 0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread(burstiness):
    times = Arrivals(10.0, burstiness).send_times(20_000, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times == sorted(times)
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.05)
    assert Arrivals(10.0, burstiness).send_times(20_000, seed=1) == times


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_changes_the_rate(kind):
    arrivals = Arrivals(ramp_up=kind, ramp_up_start_rps=1.0, ramp_up_end_rps=100.0)
    times = arrivals.send_times(10_000, seed=0)
    first, last = times[200] - times[0], times[-1] - times[-201]
    assert 20 < first / last < 120
    assert kind in arrivals.describe(None)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": 0.0},
        {"ramp_up": "linear"},
        {"ramp_up": "steep", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0},
        {"ramp_up": "linear", "ramp_up_start_rps": 0.0, "ramp_up_end_rps": 2.0},
    ],
)
def test_arrivals_that_make_no_sense(fields):
    with pytest.raises(InvalidRequestError):
        Arrivals(**fields)


def test_sampling_is_stated_and_sent_only_where_set():
    greedy = BenchSampling()
    assert greedy.fields() == {"temperature": 0.0}
    assert greedy.describe() == "greedy (temperature 0.0, stops at EOS)"
    drawn = BenchSampling(temperature=0.7, top_p=0.9, ignore_eos=True)
    assert drawn.fields() == {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    assert drawn.describe() == "random (temperature 0.7, top_p 0.9, ignore_eos True)"
    params = drawn.params(5)
    assert (params.max_tokens, params.top_p, params.ignore_eos) == (5, 0.9, True)
    with pytest.raises(InvalidRequestError, match="top_p"):
        BenchSampling(top_p=2.0)
