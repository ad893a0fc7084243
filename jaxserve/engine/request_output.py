"""Whole results in vLLM's shapes, gathered from the deltas of one request."""

import time
from dataclasses import dataclass, field

from jaxserve.engine.outputs import GenerationRequest, Logprob, OutputDelta, PromptEntries


@dataclass
class CompletionOutput:
    """One choice. token_ids include the EOS or stop token; cumulative_logprob and logprobs are
    None unless SamplingParams.logprobs asked for them. `error` says why finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class RequestMetrics:
    """When things happened, in seconds of time.monotonic(); None: has not."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """One prompt and its choices. prompt is None if only token ids were given.

    prompt_logprobs: if SamplingParams.prompt_logprobs asked for them, one dict per prompt token,
    the token itself first, and None for the first token; None altogether if there is no output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    last: OutputDelta | None = None


class OutputCollector:
    """Takes the deltas of one request, in order, from one thread; `output` joins them."""

    def __init__(self, request: GenerationRequest, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._choices = [_Choice() for _ in range(request.params.n)]
        self._metrics = RequestMetrics(time.monotonic())
        self._num_open = request.params.n
        self._num_cached = 0
        self._prompt_entries: PromptEntries | None = None

    @property
    def requests(self) -> tuple[GenerationRequest]:
        """The one request, as a job of an OfflineBatch has them."""
        return (self.request,)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    def add(self, delta: OutputDelta) -> None:
        """Take one delta; the choices may be interleaved."""
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self._prompt_entries = delta.prompt_logprobs
        if delta.index == 0:  # the other choices find what this one has computed
            self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        if delta.token_ids and self._metrics.first_token_time is None:
            self._metrics.first_token_time = time.monotonic()
        if delta.finish_reason is not None:
            assert choice.last is None, "a choice ends once"
            choice.last = delta
            self._num_open -= 1
            if self.finished:
                self._metrics.finished_time = time.monotonic()

    def output(self) -> RequestOutput:
        """What there is so far, choices in the order of their index."""
        entries = self._prompt_entries
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[self._completion(index) for index in range(len(self._choices))],
            finished=self.finished,
            metrics=self._metrics,
            num_cached_tokens=self._num_cached,
            prompt_logprobs=None if entries is None else entries.dicts(),
        )

    def _completion(self, index: int) -> CompletionOutput:
        choice = self._choices[index]
        wants_logprobs = self.request.params.logprobs is not None
        sampled = [
            entries[token].logprob
            for token, entries in zip(choice.token_ids, choice.logprobs, strict=wants_logprobs)
        ]
        last = choice.last
        return CompletionOutput(
            index=index,
            text="".join(choice.texts),
            token_ids=choice.token_ids,
            cumulative_logprob=sum(sampled) if wants_logprobs else None,
            logprobs=choice.logprobs if wants_logprobs else None,
            finish_reason=None if last is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
            error=None if last is None else last.error,
        )
