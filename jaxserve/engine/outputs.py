"""What goes in and comes out of the engine client: the types the server and `LLM` share."""

from dataclasses import dataclass

from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """One user request; `params.n` choices are drawn from one prompt.

    Choice j runs in the engine as request id f"{request_id}-{j}".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


@dataclass(frozen=True)
class Logprob:
    """As in vLLM: natural log of the raw probability, rank (1 = most likely), token as text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class OutputDelta:
    """What is new of one choice. Joined deltas equal the non-streamed result, field by field.

    text: text that can no longer change (a possible stop string or half a character is held back).
    token_ids: the new tokens, cut after the one that completed a stop string. With a stop string
    the text ends before it (unless include_stop_str_in_output); `stop_reason` is the string,
    the stop token id, or None.
    logprobs: one dict per new token, {token id: Logprob}: the token itself first, then the
    alternatives most likely first (the token may be one of them; it is not repeated).
    finish_reason: None, "stop", "length", "abort" or "error" (then `error` says why).
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


@dataclass(frozen=True)
class StepStats:
    """What one engine step did; handed to the engine's observers (metrics) after its commit.

    prompt_tokens: of the requests that drew their first token now, each counted once.
    step_tokens: tokens that ran, recomputed ones too, padding not.
    host_seconds: schedule + batch building + commit; device_seconds: dispatch to result.
    late_compiles: programs compiled after the engine was ready; always 0 in a healthy engine.
    queue_seconds: arrival to first step, of each request that had its first step now.
    prefill_seconds: first step to first token, of each request that drew its first token now.
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
