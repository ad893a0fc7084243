"""Finding stop strings in a text that arrives in pieces, wherever the pieces are cut.

The rule is a function of the text alone, so it is the same for every tokenisation and chunking:
among all matches that count, the one that starts first wins; of two that start together, the
shorter (it is complete first). A complete match therefore waits while another stop string that
began before it is still running; what arrives meanwhile is dropped once the winner is known.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """`stop` is text[start:end]; `mark` is the caller's mark of the piece that completed it."""

    start: int
    end: int
    stop: str
    mark: int


class StopMatcher:
    """Feeds every character to one Knuth-Morris-Pratt automaton per stop string.

    `match` is the best complete match so far; it is final once `decided` is true.
    `safe_length` characters of the text can be shown: neither a match nor the beginning of a
    possible one reaches into them.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of the prefix each text end matches
        self._length = 0
        self.match: StopMatch | None = None
        self.decided = False

    @property
    def safe_length(self) -> int:
        """How much of the text pushed so far can no longer become part of a stop string."""
        running = self._length - max(self._matched, default=0)
        return running if self.match is None else min(running, self.match.start)

    def push(self, piece: str, mark: int, counts: bool = True) -> None:
        """Take the next piece of text; matches that end in it count only if `counts`."""
        if not self._stops:
            self._length += len(piece)
            return
        for char in piece:
            self._advance(char, mark, counts)
            if self._is_decided():
                self.decided = True
                return

    def close(self) -> None:
        """No text will follow: the best complete match, if any, is the winner."""
        self.decided = self.match is not None

    def _advance(self, char: str, mark: int, counts: bool) -> None:
        self._length += 1
        for index, stop in enumerate(self._stops):
            fallback = self._fallbacks[index]
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = fallback[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if counts:
                    self._offer(StopMatch(self._length - matched, self._length, stop, mark))
                matched = fallback[matched]
            self._matched[index] = matched

    def _offer(self, match: StopMatch) -> None:
        best = self.match
        if best is None or (match.start, match.end) < (best.start, best.end):
            self.match = match

    def _is_decided(self) -> bool:
        """No running prefix began before the best match."""
        return self.match is not None and self._length - max(self._matched) >= self.match.start


def _fallback_table(stop: str) -> list[int]:
    """fallback[k]: length of the longest proper prefix of `stop` that ends its first k letters."""
    table = [0, 0]
    for char in stop[1:]:
        length = table[-1]
        while length and stop[length] != char:
            length = table[length]
        table.append(length + 1 if stop[length] == char else 0)
    return table
