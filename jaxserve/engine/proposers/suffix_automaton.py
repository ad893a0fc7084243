"""A suffix automaton of several texts: what occurs in them, how often, and what follows.

The smallest automaton that accepts all suffixes (Blumer et al. 1985), built token by token; a new
text starts at the root again. Strings that end at the same places share a state, so there are at
most two states per token. Texts cannot be taken out: whoever must forget drops the whole automaton.
"""

from collections.abc import Sequence
from itertools import islice

# Counting an occurrence visits the state of each of its suffixes. In a text that repeats one token
# these are as many as tokens, so only the longest ones are counted: an estimate is enough.
_COUNTED_SUFFIXES = 32
_COMPARED_SUCCESSORS = 64  # of a state when the likeliest is looked for


class SuffixAutomaton:
    """States are numbers, 0 the root. A state's strings are the suffixes of its longest one that
    are longer than the longest of its link."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._lengths = [0]  # of a state's longest string
        self._links = [-1]
        self._counts = [0]  # occurrences of its strings
        self._next: list[dict[int, int]] = [{}]
        self._last = 0  # the state of the whole text so far

    @property
    def num_states(self) -> int:
        return len(self._lengths)

    def start_text(self) -> None:
        """What is appended next begins a new text."""
        self._last = 0

    def append(self, token: int) -> None:
        """Add a token to the current text. Amortised constant time."""
        state, following = self._last, self._next
        known = following[state].get(token)
        if known is None:
            new = self._add_state(self._lengths[state] + 1, {})
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = self._links[state]
            self._links[new] = 0 if state < 0 else self._exactly(state, token)
        else:  # another text had the same up to here
            new = self._exactly(state, token)
        self._last = new
        self.num_tokens += 1
        counts, links = self._counts, self._links
        for _ in range(_COUNTED_SUFFIXES):
            if new <= 0:
                break
            counts[new] += 1
            new = links[new]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(state, length) of the longest suffix of `tokens` that occurs in the texts; (0, 0): not
        even its last token."""
        following, links, lengths = self._next, self._links, self._lengths
        state = length = 0
        for token in tokens:
            after = following[state].get(token)
            while after is None and state:
                state = links[state]
                length = lengths[state]
                after = following[state].get(token)
            if after is not None:
                state, length = after, length + 1
        return state, length

    def continuation(self, state: int, limit: int, min_probability: float) -> list[int]:
        """The most frequent tokens after a state's strings, one after the other, while all of them
        together are at least so probable by the counts; at most `limit`."""
        draft: list[int] = []
        probability = 1.0
        counts = self._counts
        while len(draft) < limit and self._next[state]:
            successors = islice(self._next[state].items(), _COMPARED_SUCCESSORS)
            token, after = max(successors, key=lambda item: counts[item[1]])
            probability *= min(counts[after] / counts[state], 1.0) if state else 0.0
            if probability < min_probability:
                break
            draft.append(token)
            state = after
        return draft

    def count(self, tokens: Sequence[int]) -> int:
        """How often `tokens` occurred (an estimate from below for very repetitive texts)."""
        state = 0
        for token in tokens:
            after = self._next[state].get(token)
            if after is None:
                return 0
            state = after
        return self._counts[state]

    def _add_state(self, length: int, following: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(0)
        self._counts.append(0)
        self._next.append(following)
        return len(self._lengths) - 1

    def _exactly(self, state: int, token: int) -> int:
        """The state after `state` by `token` whose longest string is that of `state` and the token:
        split off if the state there has longer ones, which occur at fewer places from now on."""
        after, length = self._next[state][token], self._lengths[state] + 1
        if self._lengths[after] == length:
            return after
        split = self._add_state(length, self._next[after].copy())
        self._links[split] = self._links[after]
        self._counts[split] = self._counts[after]
        self._links[after] = split
        while state >= 0 and self._next[state].get(token) == after:
            self._next[state][token] = split
            state = self._links[state]
        return split
