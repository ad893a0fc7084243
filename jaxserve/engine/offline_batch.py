"""Many requests at once for a caller that waits: any number of them, within the engine's bounds."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.engine.request_output import OutputCollector, RequestOutput
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

# How often progress is told while nothing ends, and how long an interrupted batch waits for the
# last deltas of what it aborted.
PROGRESS_SECONDS = 0.25
ABORT_SECONDS = 10.0


@dataclass
class BatchProgress:
    """Of one batch, so far. Prompt tokens count when their request has ended."""

    num_requests: int
    finished_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class OfflineBatch:
    """Runs requests through a client and gathers their results in order.

    At most `client.max_inflight` choices are open at any time; the rest waits here, so that no
    request is refused for want of room. Use an instance once.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[str | None],
    ) -> None:
        self._client = client
        self._collectors = [
            OutputCollector(request, prompt)
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        self._ended: queue.SimpleQueue[OutputCollector] = queue.SimpleQueue()
        self._open: dict[str, OutputCollector] = {}
        self._open_choices = 0
        self._next = 0
        self.progress = BatchProgress(len(requests))

    def run(self, tell: Callable[[BatchProgress], None] | None = None) -> list[RequestOutput]:
        """Results in the order of the requests; `tell` hears of progress a few times a second.

        Raises EngineDeadError if the engine died; whatever interrupts it (Ctrl-C) aborts every
        request first.
        """
        try:
            while self._next < len(self._collectors) or self._open:
                self._submit_what_fits()
                self._wait_for_an_end(tell)
        except BaseException:
            self._abort()
            raise
        self._client.raise_if_dead()
        return [collector.output() for collector in self._collectors]

    def _submit_what_fits(self) -> None:
        while self._next < len(self._collectors):
            collector = self._collectors[self._next]
            request = collector.request
            full = self._open_choices + request.params.n > self._client.max_inflight
            if full and self._open:
                return
            self._open[request.request_id] = collector  # first: an interrupt must find it
            try:
                self._client.submit(request, self._sink(collector))
            except QueueFullError:  # somebody else uses the engine too
                del self._open[request.request_id]
                if not self._open:
                    raise
                return
            except (InvalidRequestError, EngineDeadError):
                del self._open[request.request_id]
                raise
            self._open_choices += request.params.n
            self._next += 1

    def _sink(self, collector: OutputCollector) -> Callable[[OutputDelta], None]:
        """Gather on the text thread and wake the waiting caller only when the request has ended."""

        def take(delta: OutputDelta) -> None:
            collector.add(delta)
            self.progress.output_tokens += len(delta.token_ids)
            if collector.finished:
                self._ended.put(collector)

        return take

    def _wait_for_an_end(self, tell: Callable[[BatchProgress], None] | None) -> None:
        while True:
            try:
                collector = self._ended.get(timeout=None if tell is None else PROGRESS_SECONDS)
            except queue.Empty:
                collector = None
            if collector is not None:
                self._take_out(collector)
            if tell is not None:
                tell(self.progress)
            if collector is not None:
                return

    def _take_out(self, collector: OutputCollector) -> None:
        request = collector.request
        del self._open[request.request_id]
        self._open_choices -= request.params.n
        self.progress.finished_requests += 1
        self.progress.prompt_tokens += len(request.prompt_token_ids)

    def _abort(self) -> None:
        for request_id in self._open:
            self._client.abort(request_id)
        deadline = time.monotonic() + ABORT_SECONDS
        while self._open and time.monotonic() < deadline:
            try:
                self._take_out(self._ended.get(timeout=ABORT_SECONDS))
            except queue.Empty:
                return
