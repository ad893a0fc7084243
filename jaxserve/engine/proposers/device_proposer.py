"""Drafts that are computed on the device: what all that compute them have in common.

What a drafter keeps of a token lies in a pool of its own under the target's page ids: a page holds
the same tokens in both, so one allocator serves both, and whoever shares, forks or is sent back
needs nothing new. What it has not seen of a request (its prompt, or tokens drawn while nothing was
drafted) it runs first, a bounded number of tokens in a call.

It draws as the request does, with the noise that the target uses at the same positions, so sampled
requests accept what both would have drawn; penalties are the target's alone. Its failures cost
drafts, nothing else.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request

log = logging.getLogger(__name__)

_MOST_FAILURES = 3  # in a row; then it is left alone


@dataclass(eq=False)
class View:
    """A request as a drafter sees it: same tokens, the pages of one table group.

    own.num_computed counts the tokens it has run. drafted: what it ran behind the first `known`
    tokens, right or wrong, and can keep as far as the text goes on like that.
    """

    request: Request
    own: Request
    known: int = 0
    drafted: list[int] = field(default_factory=list)


class Drafter(Protocol):
    """What computes drafts, over views that `DeviceProposer` keeps. Used by the engine's thread,
    apart from `load`.

    most_drafts: of a request in a call. most_pending: tokens of a request that `draft` runs, the
    last one included. first_token: tokens before it are never run. prompt_shape: (rows, tokens)
    that `run_prompts` takes at most; None: whoever has more pending gets no drafts.
    """

    name: str
    most_drafts: int
    most_pending: int
    first_token: int

    @property
    def is_loaded(self) -> bool: ...

    @property
    def prompt_shape(self) -> tuple[int, int] | None: ...

    def load(self) -> None:
        """Compile everything it runs. On any thread, once."""

    def run_prompts(self, plan: Plan) -> None:
        """Run the plan's prefill, without drawing."""

    def draft(self, views: Sequence[View], most: Sequence[int]) -> list[list[int]]:
        """Run what is pending of each and guess on: at least most[i] tokens of each, all of which
        are at least 1. Notes in the views what it has run."""
        ...

    def reset(self) -> None:
        """Everything it kept is lost: begin again."""


class DeviceProposer:
    """A Proposer over a drafter. reserve: lets a request's pages cover so many tokens, if there are
    free ones (`Scheduler.reserve`)."""

    def __init__(
        self, drafter: Drafter, table_group: int, reserve: Callable[[str, int], bool]
    ) -> None:
        """table_group: the target's group without a window, whose pages are used."""
        self.name = drafter.name
        self._drafter = drafter
        self._group = table_group
        self._reserve = reserve
        self._views: dict[str, View] = {}
        self._failures = 0

    def load(self) -> None:
        """Compile everything it runs. On any thread, once."""
        self._drafter.load()

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        """See Proposer. None before `load`, and for who has more to catch up with than a call."""
        drafts: list[list[int]] = [[] for _ in requests]
        if not self._drafter.is_loaded or self._failures >= _MOST_FAILURES:
            return drafts
        most = [min(limit, self._drafter.most_drafts) for limit in limits]
        try:
            wanted = [
                (place, self._view(request))
                for place, request in enumerate(requests)
                if most[place] > 0
                and request.num_tokens > self._drafter.first_token
                and self._reserve(request.request_id, request.num_tokens + most[place])
            ]
            self._catch_up([view for _, view in wanted])
            ready = [item for item in wanted if not self._is_behind(item[1])]
            if ready:
                found = self._drafter.draft(
                    [view for _, view in ready], [most[place] for place, _ in ready]
                )
                for (place, _), tokens in zip(ready, found, strict=True):
                    drafts[place] = tokens[: most[place]]
                self._failures = 0  # not by catching up: what failed may be what comes after it
        except Exception:  # whatever XLA raises: its pool is lost, the target's is not
            self._failures += 1
            log.exception("%s failed (%d in a row); no drafts now", self.name, self._failures)
            self._views.clear()
            self._drafter.reset()
        return drafts

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Nothing to learn: which drafts held, the text says."""

    def forget(self, request_id: str) -> None:
        self._views.pop(request_id, None)

    def _is_behind(self, view: View) -> bool:
        """Whether it has more to run than drafting does."""
        return view.own.num_uncomputed > self._drafter.most_pending

    def _view(self, request: Request) -> View:
        """The request's view, with the pages and the text it has now."""
        view = self._views.get(request.request_id)
        first = self._drafter.first_token
        if view is None or view.request is not request:
            view = self._views[request.request_id] = View(request, _unseen(request))
            view.own.num_computed = first
        own = view.own
        if own.num_preemptions != request.num_preemptions:  # it has other pages now
            own.num_preemptions, own.num_computed = request.num_preemptions, first
            view.drafted = []
        own.pages = (request.pages[self._group],)
        if view.drafted:  # right as far as the text went on like that
            text = own.token_ids(view.known, own.num_tokens)
            right = 0
            while right < min(len(text), len(view.drafted)) and text[right] == view.drafted[right]:
                right += 1
            own.num_computed, view.drafted = view.known + right, []
        own.num_computed = min(own.num_computed, own.num_tokens - 1)
        return view

    def _catch_up(self, views: Sequence[View]) -> None:
        """Run tokens that the drafter has not seen, and cannot run while it drafts: one step at
        most."""
        shape = self._drafter.prompt_shape
        if shape is None:
            return
        rows, budget = shape
        items: list[Scheduled] = []
        for view in views:
            own = view.own
            size = min(own.num_tokens - 1 - own.num_computed, budget)
            if self._is_behind(view) and size > 0 and len(items) < rows:
                items.append(Scheduled(own, own.num_computed, size, False))
                own.num_computed += size
                budget -= size
        if items:
            self._drafter.run_prompts(Plan(prefill=tuple(items)))


def _unseen(request: Request) -> Request:
    """A copy of which nothing was computed, over the same output, which grows. It draws as the
    request does, but for what needs counts or is told to the user."""
    params = replace(
        request.params,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=None,
        prompt_logprobs=None,
    )
    own = replace(request, params=params, page_hashes=[], prompt_logprobs=[])
    own.output_token_ids = request.output_token_ids
    own.table_rows, own.sampling_slot = None, 0
    return own
