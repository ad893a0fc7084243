"""Turns what happened in a step into the events and statistics others see."""

import time

from jaxserve.core.step_batch import StepOutput
from jaxserve.engine import prompt_logprobs
from jaxserve.engine.plan import Committed, Plan
from jaxserve.engine.request import TokenEvent, TokenLogprobs


class StepTimings:
    """Watches one call of the loop: host and device time, how long requests queued and prefilled.

    device_seconds is of the step committed in it, from the end of the step before or from its own
    dispatch, whichever was later. device_idle_seconds is an upper bound.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.device_seconds = 0.0
        self.device_idle_seconds = 0.0
        self._waited_seconds = 0.0
        self.bucket = "none"
        self.queue_seconds: list[float] = []
        self.prefill_seconds: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0

    def on_plan(self, plan: Plan) -> None:
        """Note who runs for the first time. A preempted request has run before."""
        for item in (*plan.decode, *plan.prefill):
            if item.request.started_time is None:
                item.request.started_time = self.began
                self.queue_seconds.append(self.began - item.request.arrival_time)

    def on_result(self, waited_seconds: float, device_seconds: float) -> None:
        """Note that a step's result was fetched after waiting that long."""
        self._waited_seconds += waited_seconds
        self.device_seconds += device_seconds

    def on_commit(self, committed: list[Committed]) -> None:
        """Count the new tokens, and each prompt once, when its first token is drawn.

        The other choices of a user request share its leader's prompt.
        """
        now = time.monotonic()
        self.output_tokens = sum(len(news.tokens) for news in committed)
        for news in committed:
            if _is_first(news):
                if news.request.leader_id is None:
                    self.prompt_tokens += len(news.request.prompt_token_ids)
                self.prefill_seconds.append(now - (news.request.started_time or self.began))

    @property
    def host_seconds(self) -> float:
        """Time since the call began that was not spent waiting for the device."""
        return time.monotonic() - self.began - self._waited_seconds


def token_event(news: Committed, output: StepOutput, row: int) -> TokenEvent:
    """The event of new tokens, with the logprobs their request asked for."""
    logprobs = None
    wanted = news.request.params.logprobs
    if wanted is not None:
        logprobs = tuple(_token_logprobs(output, row, at, wanted) for at in range(len(news.tokens)))
    return TokenEvent(
        news.request.request_id,
        news.tokens,
        logprobs,
        news.finish_reason,
        news.stop_reason,
        num_cached_tokens=news.request.num_cached_tokens,
        prompt_logprobs=prompt_logprobs.take(news.request) if _is_first(news) else None,
    )


def _is_first(news: Committed) -> bool:
    """Whether the request had no output before."""
    return len(news.request.output_token_ids) == len(news.tokens)


def _token_logprobs(output: StepOutput, row: int, at: int, num_top: int) -> TokenLogprobs:
    raw = output.logprobs
    ids, values = raw.top_ids[row, at, :num_top], raw.top_logprobs[row, at, :num_top]
    return TokenLogprobs(
        logprob=float(raw.token_logprob[row, at]),
        rank=int(raw.token_rank[row, at]),
        # Negative ids: fewer tokens are possible than were asked for.
        top=tuple((int(i), float(x)) for i, x in zip(ids, values, strict=True) if i >= 0),
    )
