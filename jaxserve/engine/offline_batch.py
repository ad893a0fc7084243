"""Many requests at once for a caller that waits: any number of them, within the engine's bounds.

Jobs are read one by one as there is room, so only those that run or wait in the engine, and those
that have ended and were not yet taken, are in memory.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

# How often progress is told while nothing ends, how long to wait for room when somebody else has
# filled the engine, and how long an interrupted batch waits for the last deltas of what it aborted.
PROGRESS_SECONDS = 0.25
RETRY_SECONDS = 0.02
ABORT_SECONDS = 10.0


@dataclass
class BatchProgress:
    """Of one batch, so far. num_jobs None: nobody knows. Prompt tokens count when their request
    has ended."""

    num_jobs: int | None = None
    finished_jobs: int = 0
    failed_jobs: int = 0  # counted by who reads the results
    prompt_tokens: int = 0
    output_tokens: int = 0


class Job(Protocol):
    """Requests that end together. `add` takes their deltas, each request's in order, all of them
    from one thread. A job without requests is finished at once."""

    @property
    def requests(self) -> Sequence[GenerationRequest]: ...

    def add(self, delta: OutputDelta) -> None: ...


@dataclass(eq=False)
class _Open[J: Job]:
    """A job of which something was submitted, or is about to be."""

    job: J
    open_choices: int
    unsubmitted: deque[GenerationRequest]


class OfflineBatch[J: Job]:
    """Runs jobs through a client and hands them out as they end. Use an instance once.

    At most `max_open` choices are open at any time (never above `client.max_inflight`, and one
    request always may be); the rest waits here, so that no request is refused for want of room.
    """

    def __init__(
        self,
        client: EngineClient,
        jobs: Iterable[J],
        *,
        progress: BatchProgress | None = None,
        max_open: int | None = None,
    ) -> None:
        self._client = client
        self._jobs: Iterator[J] | None = iter(jobs)  # None: there are no more
        self._max_open = min(max_open or client.max_inflight, client.max_inflight)
        self._ended: queue.SimpleQueue[tuple[_Open[J], GenerationRequest]] = queue.SimpleQueue()
        self._running: dict[str, GenerationRequest] = {}  # by request id
        self._open_choices = 0
        self._next: _Open[J] | None = None  # the job whose requests are being submitted
        self.progress = progress or BatchProgress()

    def run(self, tell: Callable[[BatchProgress], None] | None = None) -> Iterator[J]:
        """The jobs in the order in which they end; `tell` hears of progress a few times a second.

        Raises what reading the jobs raises, InvalidRequestError for a request the client refuses,
        and EngineDeadError if the engine died; then, and whenever the caller stops early (Ctrl-C,
        a closed iterator), every open request is aborted first.
        """
        try:
            while True:
                submitted = self._submit_one()
                if not submitted and not self._running:
                    if self._next is None:
                        break
                    time.sleep(RETRY_SECONDS)  # somebody else has filled the engine
                    continue
                yield from self._take_ended(tell, wait=not submitted)
                if isinstance(submitted, _Open):  # it had nothing to wait for
                    yield self._finish(submitted.job, tell)
        finally:
            self._abort()

    def _submit_one(self) -> _Open[J] | bool:
        """Submit one request if there is one and room for it: whether it did.

        A job without requests is returned instead, as finished.
        """
        if self._next is None and self._jobs is not None:
            job = next(self._jobs, None)
            if job is None:
                self._jobs = None
                return False
            choices = sum(request.params.n for request in job.requests)
            self._next = _Open(job, choices, deque(job.requests))
        current = self._next
        if current is None:
            return False
        if not current.unsubmitted:
            self._next = None
            return current
        request = current.unsubmitted[0]
        if self._running and self._open_choices + request.params.n > self._max_open:
            return False
        self._running[request.request_id] = request  # first: an interrupt must find it
        try:
            self._client.submit(request, self._sink(current, request))
        except QueueFullError:  # somebody else uses the engine too
            del self._running[request.request_id]
            return False
        except (InvalidRequestError, EngineDeadError):
            del self._running[request.request_id]
            raise
        self._open_choices += request.params.n
        current.unsubmitted.popleft()
        if not current.unsubmitted:
            self._next = None
        return True

    def _sink(self, job: _Open[J], request: GenerationRequest) -> Callable[[OutputDelta], None]:
        """Gather on the text thread; wake the waiting caller only when the request has ended."""
        left = request.params.n

        def take(delta: OutputDelta) -> None:
            nonlocal left
            job.job.add(delta)
            self.progress.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                left -= 1
                if left == 0:
                    self._ended.put((job, request))

        return take

    def _take_ended(
        self, tell: Callable[[BatchProgress], None] | None, *, wait: bool
    ) -> Iterator[J]:
        """Jobs that have ended by now; with `wait`, not before some request has."""
        while True:
            try:
                job, request = self._ended.get(wait, None if tell is None else PROGRESS_SECONDS)
            except queue.Empty:
                if not wait:
                    return
                if tell is not None:
                    tell(self.progress)
                continue
            wait = False
            self._take_out(job, request)
            if job.open_choices == 0:
                yield self._finish(job.job, tell)

    def _take_out(self, job: _Open[J], request: GenerationRequest) -> None:
        del self._running[request.request_id]
        self._open_choices -= request.params.n
        job.open_choices -= request.params.n
        self.progress.prompt_tokens += len(request.prompt_token_ids)

    def _finish(self, job: J, tell: Callable[[BatchProgress], None] | None) -> J:
        self._client.raise_if_dead()
        self.progress.finished_jobs += 1
        if tell is not None:
            tell(self.progress)
        return job

    def _abort(self) -> None:
        """End what is open, and wait for it."""
        for request_id in self._running:
            self._client.abort(request_id)
        deadline = time.monotonic() + ABORT_SECONDS
        while self._running and time.monotonic() < deadline:
            try:
                self._take_out(*self._ended.get(timeout=ABORT_SECONDS))
            except queue.Empty:
                return
