"""Lookahead: n-grams of the text and of Jacobi iterations."""

import pytest

from jaxserve.engine.proposers.lookahead import LookaheadProposer
from jaxserve.engine.proposers.ngram_pool import NgramPool
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams


def make_request(prompt: list[int], name: str = "a") -> Request:
    return Request(name, tuple(prompt), SamplingParams(), max_tokens=1000, seed=0)


def test_the_pool_keeps_what_was_seen_last():
    pool = NgramPool(per_token=2, max_tokens=2)
    for ngram in ([1, 2], [1, 3], [1, 2], [1, 4], [5, 6], [7, 8]):
        pool.add(ngram)
    assert pool.find(1) == []  # two tokens are kept
    assert pool.find(5) == [(6,)]
    pool.add([5, 9])
    pool.add([5, 6])
    assert pool.find(5) == [(6,), (9,)]
    assert pool.newest(5) == (6,)
    assert pool.newest(2) is None
    assert len(pool) == 3


def test_ngrams_of_the_text():
    proposer = LookaheadProposer(size=3)
    request = make_request([1, 2, 3, 4, 9, 1])
    assert proposer.propose([request], [2]) == [[2, 3]]
    assert proposer.propose([request], [4]) == [[2, 3, 4, 9]]  # one n-gram after the other
    assert proposer.candidates(request, 5) == [[2, 3]]
    request.output_token_ids += [5, 6, 1]
    assert proposer.candidates(request, 5) == [[5, 6], [2, 3]]
    assert proposer.candidates(request, 1) == [[5, 6]]


def draw(index: int, before: int) -> int:
    """A model whose next token hangs on its place in the text, and in every third place also on
    the token before, which must be right."""
    depends = index % 3 == 0 and before != right(index - 1)
    return 5000 + before if depends else right(index)


def right(index: int) -> int:
    return 1000 + index


def steps_to(num_tokens: int, k: int, *, feed: bool) -> int:
    """Steps that this model takes, its drafts verified as the engine does."""
    proposer, request = LookaheadProposer(size=3), make_request([right(0)])
    steps = 0
    while len(request.output_token_ids) < num_tokens:
        (draft,) = proposer.propose([request], [k])
        start = request.num_tokens
        inputs = request.token_ids(start - 1, start) + draft
        drawn = [draw(start + j, token) for j, token in enumerate(inputs)]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == drawn[accepted]:
            accepted += 1
        request.output_token_ids += drawn[: accepted + 1]
        if feed:
            proposer.observe_drawn(request.request_id, start, draft, drawn)
        proposer.observe(request, draft, accepted)
        steps += 1
    assert request.output_token_ids[:num_tokens] == [right(i + 1) for i in range(num_tokens)]
    return steps


def test_jacobi_iterations_need_fewer_steps_than_tokens():
    assert steps_to(120, 4, feed=False) == 120  # nothing repeats
    assert steps_to(120, 4, feed=True) <= 60
    assert steps_to(120, 8, feed=True) <= steps_to(120, 4, feed=True)


def test_trails_follow_what_was_drafted():
    """Only tokens that were drawn after one another form n-grams."""
    proposer, request = LookaheadProposer(size=3), make_request([1])
    proposer.propose([request], [2])
    proposer.observe_drawn("a", 1, [10, 20], [5, 11, 21])
    request.output_token_ids.append(5)
    assert proposer.propose([request], [2]) == [[11, 21]]
    proposer.observe_drawn("a", 2, [11, 99], [6, 12, 100])  # 99 was drafted in place of 21
    pool = proposer._requests["a"].pool
    assert pool.find(10) == [(11, 12)]
    assert pool.find(20) == []
    proposer.observe_drawn("b", 2, [1], [2, 3])  # never seen: fine


def test_limits_and_forget():
    proposer = LookaheadProposer()
    request = make_request([1, 2, 3])
    assert proposer.propose([request], [0]) == [[]]
    assert len(proposer.propose([request], [2])[0]) == 2
    proposer.forget("a")
    proposer.forget("a")
    assert proposer._requests == {}
    with pytest.raises(ValueError, match="give >= 2"):
        LookaheadProposer(size=1)
