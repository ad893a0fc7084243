"""The interface of everything that guesses what comes next (drafts) for the target to verify."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxserve.engine.request import Request


class Proposer(Protocol):
    """Proposes drafts: tokens that may follow what a request has so far.

    Drafts never change an output, only how many tokens a step yields. Used by one thread, the
    engine's.
    """

    name: str

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        """Drafts for each request, at most limits[i] of them; none ([]) is fine.

        Called when every token drawn so far is in `output_token_ids`. A request with limit 0 gets
        no drafts; naming it nevertheless lets a proposer learn from its output.
        """
        ...

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Tell what came of a request's drafts, after the accepted ones were added to its output.

        drafted: those that were verified (perhaps fewer than were proposed).
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or is gone: keep nothing that only it needs. Unknown ids are fine."""
        ...


@runtime_checkable
class LearnsFromDraws(Protocol):
    """A proposer that also wants what was drawn behind drafts that did not hold."""

    def observe_drawn(
        self, request_id: str, start: int, drafted: Sequence[int], drawn: Sequence[int]
    ) -> None:
        """Tell what the target drew at all columns of a step with drafts, after `observe`.

        start: index in the text (prompt and output) of drawn[0]. drawn[j] was drawn after
        drafted[:j], accepted or not: one more than there are drafts.
        """
        ...
