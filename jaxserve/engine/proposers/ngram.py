"""Prompt lookup: what followed the last time the text ended like this.

The longest n-gram that prompt and output end in is looked for first, and its most recent occurrence
is copied from. It pays where an output quotes: summaries, edits of code, answers over documents,
loops.
"""

from collections.abc import Sequence

from jaxserve.engine.proposers.text_index import RequestTexts
from jaxserve.engine.request import Request


class NgramProposer:
    """Drafts copied from the request's own text; a match has `smallest` to `largest` tokens."""

    name = "ngram"

    def __init__(self, smallest: int = 2, largest: int = 5) -> None:
        if not 1 <= smallest <= largest:
            raise ValueError(f"got n-grams of {smallest} to {largest} tokens; give 1 <= min <= max")
        self._texts = RequestTexts(range(smallest, largest + 1))

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        return [
            self._draft(request, limit) if limit > 0 else []
            for request, limit in zip(requests, limits, strict=True)
        ]

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Nothing to learn: the text says it all."""

    def forget(self, request_id: str) -> None:
        self._texts.forget(request_id)

    def _draft(self, request: Request, limit: int) -> list[int]:
        index = self._texts.current(request)
        match = index.match()
        return [] if match is None else index.continuation(match[1], limit)
