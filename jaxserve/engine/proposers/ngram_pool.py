"""N-grams by their first token: what a model was seen to say after it, newest first. Bounded."""

from collections import OrderedDict
from collections.abc import Sequence


class NgramPool:
    """Continuations of tokens: at most per_token for each of at most max_tokens tokens.

    Those seen last are kept.
    """

    def __init__(self, per_token: int = 8, max_tokens: int = 4096) -> None:
        self._per_token = per_token
        self._max_tokens = max_tokens
        # Dicts used as ordered sets, what was seen last at the end.
        self._pool: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        """How many n-grams it holds."""
        return sum(len(continuations) for continuations in self._pool.values())

    def add(self, ngram: Sequence[int]) -> None:
        """Note that ngram[1:] came after ngram[0]."""
        first, continuation = ngram[0], tuple(ngram[1:])
        known = self._pool.setdefault(first, {})
        known.pop(continuation, None)
        known[continuation] = None
        if len(known) > self._per_token:
            del known[next(iter(known))]
        self._pool.move_to_end(first)
        if len(self._pool) > self._max_tokens:
            self._pool.popitem(last=False)

    def newest(self, token: int) -> tuple[int, ...] | None:
        """What came after a token most recently; None: unknown."""
        known = self._pool.get(token)
        return next(reversed(known)) if known else None

    def find(self, token: int) -> list[tuple[int, ...]]:
        """All that is known to come after a token, newest first."""
        return list(reversed(self._pool.get(token, {})))
