"""The suffix automaton against counting by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.proposers.suffix_automaton import SuffixAutomaton

texts = st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5)


def build(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.start_text()
        for token in text:
            automaton.append(token)
    return automaton


def occurrences(texts: list[list[int]], wanted: list[int]) -> int:
    size = len(wanted)
    return sum(t[i : i + size] == wanted for t in texts for i in range(len(t) - size + 1))


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_counts_of_every_substring(texts, wanted):
    automaton = build(texts)
    assert automaton.count(wanted) == occurrences(texts, wanted)
    for text in texts:
        assert automaton.count(text[2:7]) == occurrences(texts, text[2:7]) or not text[2:7]


@given(texts, st.lists(st.integers(0, 2), max_size=12))
@settings(max_examples=200, deadline=None)
def test_the_longest_suffix_that_occurs(texts, tail):
    state, length = build(texts).match(tail)
    longest = max(n for n in range(len(tail) + 1) if n == 0 or occurrences(texts, tail[-n:]))
    assert length == longest
    assert (state == 0) == (length == 0)


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_continuations_are_the_most_frequent_ones(texts, tail, limit):
    automaton = build(texts)
    state, length = automaton.match(tail)
    if not length:
        return
    draft = automaton.continuation(state, limit, min_probability=0.0)
    assert len(draft) <= limit
    context = tail[-length:]
    for token in draft:
        counts = [occurrences(texts, [*context, other]) for other in range(3)]
        assert counts[token] == max(counts) > 0
        context.append(token)
    if len(draft) < limit:  # only where no text goes on
        assert all(occurrences(texts, [*context, other]) == 0 for other in range(3))


def test_drafts_end_where_they_become_improbable():
    automaton = build([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 3, 4]])
    state, _ = automaton.match([1, 2])
    assert automaton.continuation(state, 9, 0.1) == [3, 4]
    assert automaton.continuation(state, 9, 0.6) == [3]  # 3/4, and 1/2 for both
    assert automaton.continuation(state, 9, 0.8) == []


def test_at_most_two_states_per_token_and_no_quadratic_counting():
    automaton = build([[1] * 5000])
    assert automaton.num_states <= 2 * automaton.num_tokens + 1
    assert automaton.count([1] * 10) > 0
