"""What the scheduler says: the limits it keeps, the plan of a step, and what a commit brought.

Plain data that crosses from the scheduler to the batch builder and the engine. No jax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.request import Request


@dataclass(frozen=True)
class Limits:
    """What a step and a request may take.

    max_batch_tokens counts prefill tokens of a step; decode rows come on top.
    prefill_sizes: the prefill sizes steps are padded to, ascending (`buckets.prefill_sizes`).
    max_chunk: longest chunk of one prompt in a step, or None; results do not depend on it.
    policy: who enters next, "fcfs", "priority" or "prefix" (waiting_queue.py).
    batching: "continuous", or "static": requests enter only while nothing runs.
    max_burst: most decode steps of one plan (bursts.py), of at most burst_rows rows.
    """

    max_batch_rows: int
    max_batch_tokens: int
    max_prefill_rows: int
    max_model_len: int
    max_queue: int
    prefill_sizes: tuple[int, ...] = ()
    max_chunk: int | None = None
    policy: str = "priority"
    batching: str = "continuous"
    max_burst: int = 1
    burst_rows: int = 1 << 30


type Drafts = Mapping[str, Sequence[int]]  # by request id: what its next tokens may be


class Scheduled(NamedTuple):
    """Tokens [start, start + num_tokens) of a request run in this step.

    samples: they reach its last token, so a token is drawn. epoch: the request's preemptions when
    this was planned; a result of an earlier epoch is dropped. drafts: guesses of the tokens after
    its last one, which run with it and are counted in num_tokens; as many of them as turn out right
    are new tokens, and one more is.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    epoch: int = 0
    drafts: Sequence[int] = ()


@dataclass(frozen=True)
class Transfers:
    """Pages to move before a step, in this order: all stores, then all copies, then all loads.

    stores: (page, host slot), of pages that left the pool; copies: (from page, to page), where all
    sources are read before anything is written; loads: (host slot, page).
    """

    stores: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.stores or self.copies or self.loads)


@dataclass(frozen=True)
class Plan:
    """One step. Decode rows run one token and drafts of those that follow, and always sample;
    preempted requests wait again.

    steps: how often the decode rows are run, each time with the token drawn last. More than one
    only without prefill and drafts.
    """

    decode: tuple[Scheduled, ...] = ()
    prefill: tuple[Scheduled, ...] = ()
    preempted: tuple[Request, ...] = ()
    transfers: Transfers = Transfers()
    steps: int = 1

    @property
    def is_empty(self) -> bool:
        """Nothing runs (pages may still have to be moved)."""
        return not self.decode and not self.prefill

    @property
    def num_prefill_tokens(self) -> int:
        return sum(item.num_tokens for item in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Tokens that run."""
        decode = sum(item.num_tokens for item in self.decode)
        return decode * self.steps + self.num_prefill_tokens

    @property
    def width(self) -> int:
        """The most tokens of a decode row; at least 1."""
        return max((item.num_tokens for item in self.decode), default=1)

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs of a prefill token and one that it attends to, without windows."""
        return sum(n * start + n * (n + 1) // 2 for _, start, n, *_ in self.prefill)


class Committed(NamedTuple):
    """New tokens of a request. finish_reason is "stop", "length" or None; stop_reason is the
    user's stop token id if that ended it."""

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | None
