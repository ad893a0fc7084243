"""A request as the engine knows it: token ids only, and what the engine reports about it."""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request is. A preempted request is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities of one output token and its alternatives, most likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Raw log-probabilities of n tokens in a row of a prompt, each given what comes before it: the
    token's own and those of the k most likely ones.

    top_ids holds -1 where fewer than k tokens were possible.
    """

    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    ranks: np.ndarray  # [n] int32, 1 = most likely
    top_ids: np.ndarray  # [n, k] int32, most likely first
    top_logprobs: np.ndarray  # [n, k] float32

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenEvent:
    """New output tokens of one request after one commit; the last event has a finish_reason.

    finish_reason: "stop" (EOS, stop id or stop string), "length", "abort" or "error".
    stop_reason: the stop token id of the user, if that ended it; None for the model's EOS.
    token_ids includes the EOS or stop id that ended the request.
    prompt_logprobs: of the prompt's tokens from the second one on, if they were asked for; with the
    first token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(eq=False)
class Request:
    """One choice of one user request. The engine's thread owns every field after `add`.

    num_computed: tokens whose KV is in the pool (`cached_lens` of its next step). Invariant:
    0 <= num_computed <= num_tokens - 1 between steps, unless the request is finished;
    len(pages[g]) * page_size >= num_computed for every KV group g. Page 0 in a list stands for a
    page given back because every later query's window has left it.
    num_cached_tokens: prompt tokens that its first start found in the prefix cache.
    cache_salt, adapter_id: KV is shared only between requests in which both are equal.
    leader_id: the request whose prompt it shares (another choice of the same user request).
    deadline: `time.monotonic()` at which it ends, finished or not; None: never.
    prompt_logprobs: those known and not reported yet (prompt_logprobs.py); num_prompt_logprobs: how
    many are known, always of the first tokens after the prompt's first.
    page_hashes: the prefix cache's own notes; table_rows: the batch builder's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # resolved: never None
    seed: int  # resolved: the user's, or drawn from the engine's root seed
    eos_token_ids: tuple[int, ...] = ()
    choice: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    started_time: float | None = None  # when its first step began
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: tuple[list[int], ...] = ()
    sampling_slot: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    cache_salt: str = ""
    adapter_id: int = 0
    leader_id: str | None = None
    deadline: float | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    table_rows: Any = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run before the next one can be drawn."""
        return self.num_tokens - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether they are still to be reported for it: with the first token of the first choice.
        A request that begins with output (a fork, a loaded one) goes on from one that had them."""
        asks = self.params.prompt_logprobs is not None and self.leader_id is None
        return asks and not self.output_token_ids

    @property
    def max_shared(self) -> int:
        """How many of its tokens may come from KV that exists already. The last one is always run,
        and so are those whose successors' logprobs are still to be found."""
        most = self.num_tokens - 1
        if self.wants_prompt_logprobs and self.num_prompt_logprobs < len(self.prompt_token_ids) - 1:
            return min(most, self.num_prompt_logprobs)
        return most

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        prompt = len(self.prompt_token_ids)
        head = list(self.prompt_token_ids[start:stop])
        return head + self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)]
