"""Lookahead decoding (arXiv:2402.02057): n-grams from Jacobi iterations, and no draft model.

Whatever drafts a step verifies, the target also says at each of them what it would go on with. Fed
back as the next step's drafts these guesses are a Jacobi iteration: wrong at first, and right from
the left. A guess may be right at the wrong place, so the n-grams that form along the iterations are
kept in a pool by their first token, with those of the verified text. When the text ends in a
token that begins one, that is drafted; else the guesses are, which costs the same and makes more.

This is the host's part. It learns from the draws at all columns of steps with drafts, those after
the first rejected draft too (`observe_drawn`): they are the Jacobi iteration. All guesses run as
the chain of drafts. `candidates` gives all n-grams at once, for token trees.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.engine.proposers.ngram_pool import NgramPool
from jaxserve.engine.request import Request

_MAX_PROMPT = 4096  # last tokens of a prompt that enter the pool


@dataclass
class _Lookahead:
    """What is kept of one request."""

    pool: NgramPool
    num_seen: int = 0  # tokens of the text whose n-grams are in the pool
    guess_start: int = 0  # index in the text of the first guess
    guesses: list[int] = field(default_factory=list)
    # (index in the text, token there) -> the last tokens of the iteration that led to it
    trails: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


class LookaheadProposer:
    """Drafts n-grams of `size` tokens, up to per_token known for each first token."""

    name = "lookahead"

    def __init__(self, size: int = 4, per_token: int = 8) -> None:
        if size < 2 or per_token < 1:
            raise ValueError(f"got n-grams of {size}, {per_token} per token; give >= 2 and >= 1")
        self._size = size
        self._per_token = per_token
        self._requests: dict[str, _Lookahead] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        return [
            self._draft(request, limit) if limit > 0 else []
            for request, limit in zip(requests, limits, strict=True)
        ]

    def candidates(self, request: Request, limit: int) -> list[list[int]]:
        """All known continuations of its last token, newest first, for a tree of drafts: at most
        `limit` of them, of size - 1 tokens each."""
        state = self._current(request)
        found = state.pool.find(request.token_ids(request.num_tokens - 1, request.num_tokens)[0])
        return [list(continuation) for continuation in found[:limit]]

    def observe_drawn(
        self, request_id: str, start: int, drafted: Sequence[int], drawn: Sequence[int]
    ) -> None:
        """See LearnsFromDraws: the next Jacobi iteration. The pool learns the n-grams in it."""
        state = self._requests.get(request_id)
        if state is None:
            return
        trails = {}
        for j, token in enumerate(drafted):
            place = start + j
            trail = state.trails.get((place, token), (token,))[-(self._size - 1) :]
            trail += (drawn[j + 1],)
            trails[place + 1, drawn[j + 1]] = trail
            if len(trail) == self._size:
                state.pool.add(trail)
        state.trails = trails
        state.guess_start, state.guesses = start, list(drawn)

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Nothing more: the text and `observe_drawn` say it all."""

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _draft(self, request: Request, limit: int) -> list[int]:
        """N-grams of the pool, one after the other, then guesses, then tokens from the text: what
        is not accepted makes guesses all the same."""
        state = self._current(request)
        total = request.num_tokens
        token = request.token_ids(total - 1, total)[0]
        draft: list[int] = []
        while len(draft) < limit and (continuation := state.pool.newest(token)) is not None:
            draft += continuation
            token = continuation[-1]
        if len(draft) < limit:
            draft += state.guesses[total + len(draft) - state.guess_start :]
        if len(draft) < limit:
            draft += request.token_ids(max(total - limit, 0), total)
        return draft[:limit]

    def _current(self, request: Request) -> _Lookahead:
        """Its state, with the n-grams of the text that is new."""
        state = self._requests.get(request.request_id)
        if state is None:
            first = max(len(request.prompt_token_ids) - _MAX_PROMPT, 0)
            state = _Lookahead(NgramPool(self._per_token), num_seen=first)
            self._requests[request.request_id] = state
        total = request.num_tokens
        begin = max(state.num_seen - self._size + 1, 0)
        window: deque[int] = deque(maxlen=self._size)
        for token in request.token_ids(begin, total) if total > state.num_seen else ():
            window.append(token)
            if len(window) == self._size:
                state.pool.add(tuple(window))
        state.num_seen = total
        return state
