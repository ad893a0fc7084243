"""Prompt lookup: drafts continue an earlier occurrence of the text's end, found incrementally."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.proposers import text_index
from jaxserve.engine.proposers.ngram import NgramProposer
from jaxserve.engine.proposers.text_index import TextIndex
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams

tokens = st.lists(st.integers(0, 3), max_size=90)
pieces = st.lists(tokens, min_size=1, max_size=6)


def make_request(prompt: list[int], output: list[int] | None = None, name: str = "a") -> Request:
    request = Request(name, tuple(prompt), SamplingParams(), max_tokens=100, seed=0)
    request.output_token_ids += output or []
    return request


def slow_match(text: list[int], smallest: int, largest: int) -> tuple[int, int] | None:
    """By comparing the text's end with every place, the definition."""
    for size in range(min(largest, len(text) - 1), smallest - 1, -1):
        for after in range(len(text) - 1, size - 1, -1):
            if text[after - size : after] == text[-size:]:
                return size, after
    return None


@given(pieces, st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_the_longest_match_and_of_those_the_most_recent(pieces, smallest, more):
    largest = smallest + more
    index = TextIndex(range(smallest, largest + 1))
    for piece in pieces:
        index.extend(piece)
        assert index.match() == slow_match(index.text, smallest, largest)


@given(pieces, st.sets(st.sampled_from([1, 2, 3, 5, 8, 16]), min_size=1))
@settings(max_examples=150, deadline=None)
def test_an_index_that_grew_is_one_built_at_once(pieces, sizes):
    grown, rebuilt, by_token = TextIndex(sizes), TextIndex(sizes), TextIndex(sizes)
    whole = [token for piece in pieces for token in piece]
    for piece in pieces:
        grown.extend(piece)
    rebuilt.extend(whole)
    for token in whole:
        by_token.extend([token])
    assert vars(grown) == vars(rebuilt) == vars(by_token)


@given(tokens, tokens, st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_drafts_continue_an_earlier_place_with_the_same_end(prompt, output, limit):
    request = make_request([9, *prompt], output)
    (draft,) = NgramProposer(2, 4).propose([request], [limit])
    text = request.token_ids(0, request.num_tokens)
    if not draft:
        assert slow_match(text, 2, 4) is None
        return
    assert len(draft) == limit
    longer = text + draft
    assert any(
        longer[after - 2 : after] == text[-2:] and longer[after : after + limit] == draft
        for after in range(2, len(text))
    )


def test_what_follows_the_longest_match():
    request = make_request([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert NgramProposer(1, 5).propose([request], [2]) == [[4, 9]]  # 1 2 3 before 2 3
    assert NgramProposer(1, 2).propose([request], [2]) == [[5, 1]]  # 2 3: the most recent one


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_b26_repetitive_texts_are_continued_as_far_as_asked(k):
    loop = [5, 6, 7]
    request = make_request([1, *loop, *loop], [5])
    (draft,) = NgramProposer().propose([request], [k])
    assert draft == [6, 7, 5, 6, 7][:k]
    assert NgramProposer().propose([make_request([4, 4, 4, 4])], [k]) == [[4] * k]


def test_nothing_to_say():
    proposer = NgramProposer()
    for prompt in ([], [1], [1, 2], [1, 2, 3, 4]):
        assert proposer.propose([make_request(prompt, name=str(prompt))], [5]) == [[]]
    assert proposer.propose([make_request([1, 1, 1, 1])], [0]) == [[]]
    assert proposer.propose([], []) == []


def test_requests_are_apart_and_forgotten():
    proposer = NgramProposer()
    first, second = make_request([1, 2, 3, 1, 2], name="a"), make_request([7, 1, 2], name="b")
    assert proposer.propose([first, second], [1, 1]) == [[3], []]
    proposer.forget("a")
    proposer.forget("never seen")
    assert len(proposer._texts) == 1
    proposer.forget("b")
    assert len(proposer._texts) == 0


def test_output_that_was_taken_back():
    proposer = NgramProposer()
    request = make_request([1, 2, 3], [1, 2, 8, 8])
    assert proposer.propose([request], [1]) == [[]]
    del request.output_token_ids[2:]
    assert proposer.propose([request], [2]) == [[3, 1]]


def test_of_very_long_prompts_the_end_is_indexed(monkeypatch):
    monkeypatch.setattr(text_index, "MAX_TEXT", 8)
    proposer = NgramProposer(2, 2)
    request = make_request([1, 2, 3, *range(10, 20), 1, 2])
    assert proposer.propose([request], [1]) == [[]]
    request.output_token_ids += [18, 19]
    assert proposer.propose([request], [2]) == [[1, 2]]


def test_equal_keys_of_different_ngrams_are_no_match(monkeypatch):
    monkeypatch.setattr(text_index, "_MASK", 0)  # all keys are equal
    proposer = NgramProposer(2, 3)
    assert proposer.propose([make_request([1, 2, 3, 4, 5, 6])], [3]) == [[]]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="1 <= min <= max"):
        NgramProposer(3, 2)
