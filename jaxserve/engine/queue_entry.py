"""A request as the scheduler keeps it, and what the steps in flight will have done to it.

One plan may be scheduled while an earlier one is not committed yet, so the scheduler counts with
what will be true then: `scheduled` runs ahead of request.num_computed, `length` ahead of
request.num_tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.plan import Scheduled
from jaxserve.engine.request import Request

FIRST_RANK = float("-inf")  # before every priority


@dataclass(eq=False, slots=True)
class Entry:
    """A request that waits or runs.

    order: (rank, arrival time, number of the request): who is served first, lowest first.
    family: the request whose prompt it shares, or its own id.
    longest: tokens of prompt and output at which it ends at the latest.
    length: tokens that are known or being drawn. scheduled: num_computed after the steps in flight.
    room: tokens that its page lists cover in every group. growth: pages it may need next.
    """

    request: Request
    order: tuple[float, float, int]
    family: str
    longest: int
    length: int
    scheduled: int = 0
    room: int = 0
    growth: int = 0

    @property
    def age(self) -> tuple[float, int]:
        """When it came, whatever its rank."""
        return self.order[1:]

    @property
    def num_unscheduled(self) -> int:
        """Tokens to run before the next one is drawn; never 0."""
        return self.length - self.scheduled

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that is not committed yet works on it."""
        return self.scheduled > self.request.num_computed

    def take(self, num_tokens: int) -> Scheduled:
        """Note that its next `num_tokens` tokens are in flight."""
        start = self.scheduled
        self.scheduled += num_tokens
        samples = self.scheduled == self.length
        self.length += samples
        return Scheduled(self.request, start, num_tokens, samples, self.request.num_preemptions)

    def decode(self, steps: int, drafts: Sequence[int]) -> Scheduled:
        """Note that its last token is in flight, with drafts of the next ones, or with those that
        are drawn in the same plan."""
        request, start, ahead = self.request, self.length - 1, steps - 1 + len(drafts)
        self.scheduled = self.length + ahead
        self.length += 1 + ahead
        return Scheduled(request, start, 1 + len(drafts), True, request.num_preemptions, drafts)

    def take_back(self, num_tokens: int) -> None:
        """That many of the tokens in flight were drafts that turned out wrong."""
        self.scheduled -= num_tokens
        self.length -= num_tokens

    def reset(self) -> None:
        """It lost its pages and whatever was in flight."""
        self.request.num_computed = self.scheduled = self.room = self.growth = 0
        self.length = self.request.num_tokens


def order_of(entry: Entry) -> tuple[float, float, int]:
    return entry.order


def age_of(entry: Entry) -> tuple[float, int]:
    return entry.order[1:]
