"""The stop-string rule against plain str.find on the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.stop_strings import StopMatcher

ALPHABET = "aab"  # few letters: many overlaps
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str], counts_from: int = 0) -> tuple[int, int] | None:
    """(start, end) of the earliest match that ends after `counts_from`, the shorter on a tie."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, counts_from - len(stop) + 1))
        if start >= 0:
            found.append((start, start + len(stop)))
    return min(found, default=None)


def run(pieces: list[str], stops: list[str]) -> StopMatcher:
    matcher = StopMatcher(tuple(stops))
    for mark, piece in enumerate(pieces):
        if not matcher.decided:
            matcher.push(piece, mark)
    if not matcher.decided:
        matcher.close()
    return matcher


@settings(deadline=None)
@given(PIECES, STOPS)
def test_winner_is_the_first_match_of_the_whole_text(pieces, stops):
    matcher = run(pieces, stops)
    expected = first_match("".join(pieces), stops)
    if expected is None:
        assert matcher.match is None
        assert not matcher.decided
        return
    assert matcher.decided
    match = matcher.match
    assert (match.start, match.end) == expected
    assert match.stop == "".join(pieces)[match.start : match.end]
    lengths = [len("".join(pieces[: n + 1])) for n in range(len(pieces))]
    assert match.mark == next(n for n, length in enumerate(lengths) if length >= match.end)


@settings(deadline=None)
@given(PIECES, PIECES, STOPS)
def test_a_match_counts_only_if_it_ends_after_the_minimum(before, after, stops):
    matcher = StopMatcher(tuple(stops))
    for piece in before:
        matcher.push(piece, 0, counts=False)
    for piece in after:
        if not matcher.decided:
            matcher.push(piece, 1)
    if not matcher.decided:
        matcher.close()
    expected = first_match("".join(before + after), stops, counts_from=len("".join(before)))
    match = matcher.match
    assert (None if match is None else (match.start, match.end)) == expected


@settings(deadline=None)
@given(PIECES, STOPS)
def test_holds_back_exactly_what_could_still_become_a_stop(pieces, stops):
    matcher = StopMatcher(tuple(stops))
    text = ""
    for piece in pieces:
        text += piece
        matcher.push(piece, 0)
        if matcher.match is not None:
            assert matcher.safe_length <= matcher.match.start
            return
        running = [p for p in range(len(text)) if any(s.startswith(text[p:]) for s in stops)]
        assert matcher.safe_length == min(running, default=len(text))


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcabd", ["abd"], (3, 6)),
        ("xaab", ["aab", "ab"], (1, 4)),  # the same end: the one that began first
        ("xabc", ["abc", "ab"], (1, 3)),  # the same start: the one that is complete first
        ("abcdefg", ["cd", "bcdefg"], (1, 7)),  # a complete match waits for an earlier beginning
        ("abcdeXX", ["cd", "bcdefg"], (2, 4)),  # ... which did not come true
        ("abcde", ["cd", "bcdefg"], (2, 4)),  # ... or cannot any more
    ],
)
def test_ties_and_overlaps(text, stops, expected):
    match = run(list(text), stops).match
    assert (match.start, match.end) == expected


def test_no_stop_strings_hold_nothing_back():
    matcher = StopMatcher(())
    matcher.push("abc", 0)
    assert matcher.safe_length == 3
    matcher.close()
    assert not matcher.decided
