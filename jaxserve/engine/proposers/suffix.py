"""Suffix decoding (arXiv:2411.04975): what followed the longest match, here or in earlier outputs.

Two sources: the request's own text and the ended outputs of all requests with the same cache salt
and adapter. The longer match is continued; of equal ones, the request's own. The longer the match
the more is drafted, and from earlier outputs only as far as the counts make it probable enough. It
pays where answers resemble each other: agents, templates, the same question again.
"""

from collections.abc import Sequence

from jaxserve.engine.proposers.output_history import OutputHistory
from jaxserve.engine.proposers.text_index import RequestTexts
from jaxserve.engine.request import Request

MAX_HISTORY_TOKENS = 1 << 17
_OWN_SIZES = (2, 3, 4, 6, 8, 12, 16)  # n-grams by which the own text is looked up
_SHORTEST = 2  # tokens of a match: one alone says too little
_LEARNED_PER_CALL = 64  # tokens of earlier outputs


class SuffixProposer:
    """Drafts from own text and earlier outputs.

    max_depth: tokens of the text's end that a match is looked for in. max_outputs: earlier outputs
    kept at most; 0: none. spec_factor: drafts per token of the match. min_prob: how probable all
    drafts together must be by the counts of earlier outputs.
    """

    name = "suffix"

    def __init__(
        self,
        max_depth: int = 24,
        max_outputs: int = 10_000,
        spec_factor: float = 1.0,
        min_prob: float = 0.1,
        max_history_tokens: int = MAX_HISTORY_TOKENS,
    ) -> None:
        self._max_depth = max_depth
        self._spec_factor = spec_factor
        self._min_prob = min_prob
        self.history = OutputHistory(max_history_tokens, max_outputs)
        self._texts = RequestTexts(_OWN_SIZES)
        self._requests: dict[str, Request] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        if any(limit > 0 for limit in limits):
            self.history.learn(_LEARNED_PER_CALL)
        drafts = []
        for request, limit in zip(requests, limits, strict=True):
            self._requests[request.request_id] = request
            drafts.append(self._draft(request, limit) if limit > 0 else [])
        return drafts

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Nothing to learn before the output has ended."""

    def forget(self, request_id: str) -> None:
        """Its output becomes an earlier one."""
        self._texts.forget(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.history.add(_group(request), request.output_token_ids)

    def _draft(self, request: Request, limit: int) -> list[int]:
        index = self._texts.current(request)
        own_length, own_after = 0, 0
        if (match := index.match()) is not None:
            own_after = match[1]
            own_length = index.match_length(own_after, match[0], self._max_depth)
        tail = index.text[-self._max_depth :]
        length, draft = self.history.draft(
            _group(request), tail, limit, self._spec_factor, self._min_prob
        )
        if length > own_length and length >= _SHORTEST and draft:
            return draft
        if own_length < _SHORTEST:
            return []
        return index.continuation(own_after, min(limit, int(self._spec_factor * own_length)))


def _group(request: Request) -> tuple[str, int]:
    return request.cache_salt, request.adapter_id
