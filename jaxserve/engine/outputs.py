"""What goes in and comes out of the engine client: the types the server and `LLM` share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.request import PromptLogprobs
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams

MAX_TIMEOUT = 86_400.0  # seconds; who waits longer needs no timeout
MAX_CACHE_SALT = 256  # characters; enough for any digest


@dataclass(frozen=True)
class GenerationRequest:
    """One user request; `params.n` choices are drawn from one prompt.

    Choice j runs in the engine as request id f"{request_id}-{j}". timeout: seconds from `submit`
    after which what has not ended ends as "timeout", with what it has by then; None: never.
    cache_salt: KV in the prefix cache is shared only with requests that have the same.

    Raises InvalidRequestError naming the field for a timeout or salt out of range.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_cache_salt(self.cache_salt)


def check_timeout(timeout: object) -> None:
    """Raise InvalidRequestError unless it is None or a number of seconds above 0, within a day."""
    if timeout is None:
        return
    number = timeout if isinstance(timeout, int | float) else 0  # true is not one second
    if isinstance(timeout, bool) or not 0 < number <= MAX_TIMEOUT:
        raise InvalidRequestError(
            f"timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT:g}", "timeout"
        )


def check_cache_salt(salt: object) -> None:
    """Raise InvalidRequestError unless it is a text that can be hashed and is not too long."""
    if not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT or not _is_unicode(salt):
        raise InvalidRequestError(
            f"cache_salt must be a text of at most {MAX_CACHE_SALT} characters", "cache_salt"
        )


def _is_unicode(text: str) -> bool:
    """Whether it can be encoded: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Logprob:
    """As in vLLM: natural log of the raw probability, rank (1 = most likely), token as text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """Logprobs of a prompt on their way to who asked: made into texts by the reader, not on a
    thread that serves everybody. text_of: one token as text; any thread may call it."""

    raw: PromptLogprobs
    text_of: Callable[[int], str]

    def dicts(self) -> list[dict[int, Logprob] | None]:
        """For each prompt token, as in vLLM, {token id: Logprob}: the token itself first, then the
        alternatives, most likely first. None for the first one, which nothing comes before."""
        text_of = cache(self.text_of)
        raw = self.raw
        entries: list[dict[int, Logprob] | None] = [None]
        for token, logprob, rank, top_ids, top_logprobs in zip(
            raw.token_ids.tolist(),
            raw.logprobs.tolist(),
            raw.ranks.tolist(),
            raw.top_ids.tolist(),
            raw.top_logprobs.tolist(),
            strict=True,
        ):
            entry = {token: Logprob(logprob, rank, text_of(token))}
            for place, (other, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
                if other >= 0 and other != token:
                    entry[other] = Logprob(value, place, text_of(other))
            entries.append(entry)
        return entries


@dataclass(frozen=True)
class OutputDelta:
    """What is new of one choice. Joined deltas equal the non-streamed result, field by field.

    text: text that can no longer change (a possible stop string or half a character is held back).
    token_ids: the new tokens, cut after the one that completed a stop string. With a stop string
    the text ends before it (unless include_stop_str_in_output); `stop_reason` is the string,
    the stop token id, or None.
    logprobs: one dict per new token, {token id: Logprob}: the token itself first, then the
    alternatives most likely first (the token may be one of them; it is not repeated).
    finish_reason: None, "stop", "length", "abort", "timeout" or "error" (then `error` says why).
    prompt_logprobs: if they were asked for, with the first token of choice 0.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptEntries | None = None


@dataclass(frozen=True)
class StepStats:
    """What one engine step did; handed to the engine's observers (metrics) after its commit.

    prompt_tokens: of the user requests that drew their first token now, each counted once.
    step_tokens: tokens that ran, recomputed ones too, padding not.
    host_seconds: schedule + batch building + commit; device_seconds: dispatch to result.
    late_compiles: programs compiled after the engine was ready; always 0 in a healthy engine.
    queue_seconds: arrival to first step, of each request that had its first step now.
    prefill_seconds: first step to first token, of each request that drew its first token now.
    prefix_queried_tokens, prefix_hit_tokens: tokens looked up in the prefix cache by the requests
    admitted now, and those of them that it had.
    kv_waste_tokens: places for tokens in the pages that running requests hold and do not use, now.
    pages_cached: pages that no request holds and the prefix cache could still use, now.
    pages_stored, pages_loaded: copied to and from host memory in this step.
    speculation: what came of drafts in the steps committed now; None: there are none.
    device_idle_seconds: between the end of the step before and the start of this one, while there
    was work.
    """

    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    output_tokens: int
    step_tokens: int
    num_preemptions: int
    host_seconds: float
    device_seconds: float
    bucket: str
    late_compiles: int
    queue_seconds: tuple[float, ...] = ()
    prefill_seconds: tuple[float, ...] = ()
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_waste_tokens: int = 0
    pages_cached: int = 0
    pages_stored: int = 0
    pages_loaded: int = 0
    device_idle_seconds: float = 0.0
    speculation: SpeculationStats | None = None
