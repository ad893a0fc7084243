"""Speculation by look-up changes no token, whatever a request asks for."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.sampling_params import SamplingParams
from tests.support.matrix import said
from tests.support.speculating import MAX_LEN, METHODS, ask, make, prompts, speculation
from tests.support.tiny_engine import Run, drive, request

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SOME = prompts()[::3]
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
KINDS = {
    "penalties": replace(GREEDY, **PENALTIES),
    "bias": replace(GREEDY, logit_bias={65: 3.0, 7: -20.0}),
    "seeded": replace(GREEDY, temperature=0.9, top_p=0.9, seed=11),
    "unseeded": replace(GREEDY, temperature=1.5, top_k=40, min_p=0.01),
    "all": replace(
        GREEDY, temperature=0.7, seed=-4, logit_bias={65: 2.0}, min_tokens=9,
        stop_token_ids=list(range(0, 256, 6)), ignore_eos=False, **PENALTIES,
    ),
    "b18-cold": replace(GREEDY, temperature=1e-6, seed=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    """Said without speculation, each kind of request once."""
    engine, known = make(prefix_cache=False), {}

    def answer(params: SamplingParams, which=None) -> Run:
        key = repr((params, which))
        if key not in known:
            known[key] = drive(engine, ask(params, which))
        return known[key]

    return answer


def speculated(method: str, params: SamplingParams, which=None, *, k: int = 3, together=True):
    """(run, what came of its drafts)"""
    engine = make(speculation(method, k))
    return drive(engine, ask(params, which), together=together), engine.speculation


def assert_same(got: Run, expected: Run) -> None:
    assert got.tokens == expected.tokens
    assert got.finish == expected.finish
    assert got.errors == expected.errors == {}


def assert_both_came_up(stats: SpeculationStats) -> None:
    """Drafts that held, and drafts that did not."""
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("method", METHODS)
def test_b26_greedy_ids_of_50_prompts_in_batches_of_8(plain, method: str) -> None:
    run, stats = speculated(method, GREEDY, k=8)
    assert_same(run, plain(GREEDY))
    assert_both_came_up(stats)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_b26_tokens_of_every_kind_of_request(plain, method: str, kind: str) -> None:
    run, stats = speculated(method, KINDS[kind], SOME)
    assert_same(run, plain(KINDS[kind], SOME))
    assert stats.num_drafted > 0 or method == "ngram"  # sampled texts may repeat nothing


@pytest.mark.parametrize("temperature", [1e-45, 1e-7, 1e-3])
def test_b18_cold_requests_beside_warm_ones(plain, temperature: float) -> None:
    """They say what greedy ones do, and the warm ones what they say alone."""
    cold, warm = (replace(GREEDY, temperature=value) for value in (temperature, 1.0))
    engine = make(speculation("lookahead", 3))
    run = drive(
        engine,
        [
            request(f"{name}{i}", prompt, params, seed=100 + i)
            for i, prompt in enumerate(SOME)
            for name, params in (("cold", cold), ("warm", warm))
        ],
    )
    assert run.errors == {}
    for i in range(len(SOME)):
        assert run.tokens[f"cold{i}"] == plain(GREEDY, SOME).tokens[f"r{i}"]
        assert run.tokens[f"warm{i}"] == plain(warm, SOME).tokens[f"r{i}"]
    assert_both_came_up(engine.speculation)


def test_requests_of_all_kinds_and_wishes_in_one_batch(plain) -> None:
    """Rows with different numbers of drafts, none among them."""
    engine = make(speculation("lookahead", 8))
    kinds = [replace(params, num_speculative_tokens=i) for i, params in enumerate(KINDS.values())]
    requests = [
        request(f"{i}-{j}", prompt, params, seed=100 + j)
        for i, params in enumerate(kinds)
        for j, prompt in enumerate(SOME[:3])
    ]
    run = drive(engine, requests)
    for i, params in enumerate(KINDS.values()):
        expected = plain(params, SOME)
        for j in range(3):
            assert run.tokens[f"{i}-{j}"] == expected.tokens[f"r{j}"], (i, j)
    assert engine.speculation.num_accepted > 0


def test_no_drafts_for_whoever_wants_none() -> None:
    engine = make(speculation("lookahead", 3))
    drive(engine, ask(replace(GREEDY, num_speculative_tokens=0), SOME))
    assert engine.speculation.num_drafted == 0
    drive(engine, ask(replace(GREEDY, num_speculative_tokens=1), SOME))
    stats = engine.speculation
    assert stats.num_drafted == stats.num_drafts > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_plain_decoding(plain, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, logprobs=3)
    run, stats = speculated("lookahead", params, SOME)
    assert_both_came_up(stats)
    expected = plain(params, SOME)
    assert_same(run, expected)
    for name, entries in said(expected).items():
        assert len(entries) == len(expected.tokens[name])
        for (logprob, top), (other, others) in zip(entries, said(run)[name], strict=True):
            assert np.isclose(logprob, other, atol=1e-4)
            assert [token for token, _ in top] == [token for token, _ in others]
            assert np.allclose([p for _, p in top], [p for _, p in others], atol=1e-4)


def test_a_stop_id_inside_an_accepted_run_ends_it(plain) -> None:
    """Whatever was accepted behind it is dropped."""
    engine = make(speculation("lookahead", 3))
    for text in range(0, 50, 4):
        ids = plain(GREEDY).tokens[f"r{text}"]
        which = [prompts()[text]] * len(set(ids))
        requests = [
            request(f"r{i}", prompt, replace(GREEDY, stop_token_ids=[stop]))
            for i, (prompt, stop) in enumerate(zip(which, sorted(set(ids)), strict=True))
        ]
        run = drive(engine, requests)
        for i, stop in enumerate(sorted(set(ids))):
            assert run.tokens[f"r{i}"] == ids[: ids.index(stop) + 1]
            assert run.finish[f"r{i}"] == "stop"
    assert engine.speculation.num_accepted > 0


@pytest.mark.parametrize("min_tokens", [1, 7, 15])
def test_min_tokens_holds_back_a_stop_id_inside_a_run(plain, min_tokens: int) -> None:
    params = replace(GREEDY, min_tokens=min_tokens, stop_token_ids=list(range(0, 256, 6)))
    run, stats = speculated("lookahead", params, SOME)
    expected = plain(params, SOME)
    assert_same(run, expected)
    assert min(map(len, run.tokens.values())) >= min_tokens
    assert set(run.finish.values()) >= {"stop"}
    assert stats.num_drafted > 0


def test_max_tokens_cuts_a_run(plain) -> None:
    engine = make(speculation("lookahead", 8))
    for most in range(1, 12):
        run = drive(engine, ask(replace(GREEDY, max_tokens=most), SOME))
        for name, ids in plain(GREEDY, SOME).tokens.items():
            assert run.tokens[name] == ids[:most]
        assert set(run.finish.values()) == {"length"}


def test_the_longest_text_cuts_a_run(plain) -> None:
    long = [tuple([5, 6, 7] * 40)[: MAX_LEN - rest] for rest in range(1, 13)]
    params = replace(GREEDY, max_tokens=200)
    run, stats = speculated("lookahead", params, long, k=8)
    assert_same(run, plain(params, long))
    for prompt, ids in zip(long, run.tokens.values(), strict=True):
        assert len(prompt) + len(ids) <= MAX_LEN
    assert stats.num_drafted > 0


def test_choices_of_a_request(plain) -> None:
    params = replace(GREEDY, temperature=0.8, seed=5)

    def requests():
        for i, prompt in enumerate(SOME[-4:]):
            for choice in range(4):
                item = request(f"{i}-{choice}", prompt, params, choice=choice)
                item.leader_id = f"{i}-0" if choice else None
                yield item

    engine = make(speculation("lookahead"))
    run = drive(engine, list(requests()))
    assert_same(run, drive(make(), list(requests())))
    assert len({tuple(run.tokens[f"0-{choice}"]) for choice in range(4)}) > 1
    assert engine.speculation.num_accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_adaptive_speculation_says_the_same(plain, method: str) -> None:
    engine = make(speculation(method, 8, adaptive=True))
    for _ in range(2):
        assert_same(drive(engine, ask(GREEDY)), plain(GREEDY))


def test_lookahead_learns_from_what_is_drawn_behind_wrong_drafts() -> None:
    """N-grams that never stood in the text; told nothing but the text, it knows no other ones."""
    new: list[int] = []
    for told in (True, False):
        engine = make(speculation("lookahead", 3))
        speculator = engine._loop._speculator
        if not told:
            speculator._learner = None
        item = request("r", SOME[1], GREEDY)
        engine.add(item)
        while len(item.output_token_ids) < 15:
            engine.step()
        pool = speculator._proposer._requests["r"].pool
        text = item.token_ids(0, item.num_tokens)
        ngrams = {tuple(text[i : i + 4]) for i in range(len(text) - 3)}
        known = {(first, *rest) for first in range(256) for rest in pool.find(first)}
        new.append(len(known - ngrams))
        drive(engine, [])
    assert new[0] > 0
    assert new[1] == 0


def test_nothing_is_drafted_from_the_batch_size_on_that_disables_it(plain) -> None:
    engine = make(speculation("lookahead", disable_by_batch_size=2))
    assert_same(drive(engine, ask(GREEDY, SOME[:8])), plain(GREEDY, SOME[:8]))
    assert engine.speculation.num_drafted == 0
    assert engine.speculation.num_rows > 0
    drive(engine, ask(GREEDY, SOME[:2]), together=False)
    assert engine.speculation.num_drafted > 0
