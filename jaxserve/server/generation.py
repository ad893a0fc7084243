"""The requests of one HTTP call while they run: submitted together, gathered, always aborted.

The engine's text thread hands deltas over; the event loop takes them from here. Leaving the
context (an answer sent, an error, a client that hung up) aborts whatever still runs, so no page of
the pool outlives its reader.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Self

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError
from jaxserve.server.metrics import ChoiceTimer, ServerMetrics

POLL_SECONDS = 1.0


class Generation:
    """`async with Generation(...) as generation: batch = await generation.next()`.

    Choice i * n + j of the call is choice j of requests[i]. `next` returns the deltas that are
    there, in order, as (choice, delta); it never waits while some are. `finished` tells when every
    choice has had its last one.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[GenerationRequest],
        metrics: ServerMetrics,
        arrival: float,
        executor: Executor,
        *,
        max_backlog: int | None = None,
        on_overflow: Callable[[], None] | None = None,
    ) -> None:
        """max_backlog: how many tokens and logprobs `next` may be behind before everything is
        aborted and `on_overflow` is called; None for a caller that takes all there will be.
        """
        self._client = client
        self._requests = requests
        self._executor = executor
        self._max_backlog = max_backlog
        self._on_overflow = on_overflow
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[int, OutputDelta]] = deque()
        self._backlog = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._accepted = False
        self._timers: dict[int, ChoiceTimer] = {}
        self._base: dict[str, int] = {}
        for request in requests:
            self._base[request.request_id] = len(self._timers)
            for _ in range(request.params.n):
                timer = ChoiceTimer(metrics, arrival, len(request.prompt_token_ids))
                self._timers[len(self._timers)] = timer
        self.num_choices = len(self._timers)

    async def __aenter__(self) -> Self:
        try:
            await self._loop.run_in_executor(self._executor, self._submit_all)
        except BaseException:
            self._abort()
            raise
        self._accepted = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abort()

    @property
    def finished(self) -> bool:
        """Whether every choice's last delta was returned by `next`."""
        return not self._timers and not self._pending

    async def next(self) -> list[tuple[int, OutputDelta]]:
        """The deltas not yet returned, at least one.

        Raises EngineDeadError when the engine died without a word.
        """
        while not self._pending:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
            if not self._pending and not self._client.is_healthy(float("inf")):
                raise EngineDeadError("the engine has stopped")
        batch = list(self._pending)
        self._pending.clear()
        self._backlog = 0
        return batch

    def _submit_all(self) -> None:
        """Hand over all requests, on a worker thread: each prompt is checked token by token.

        The caller may be cancelled meanwhile and abort; what it came too early for is aborted here.
        """
        for request in self._requests:
            if not self._closed:
                self._client.submit(request, self._on_delta)
        if self._closed:
            self._abort_requests()

    def _on_delta(self, delta: OutputDelta) -> None:
        """Called on the text thread, in order."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody reads
                self._loop.call_soon_threadsafe(self._take, delta, time.monotonic())

    def _take(self, delta: OutputDelta, now: float) -> None:
        choice = self._base[delta.request_id] + delta.index
        timer = self._timers.get(choice)
        if self._closed or timer is None:
            return
        timer.on_delta(delta, now)
        if delta.finish_reason is not None:
            del self._timers[choice]
        self._pending.append((choice, delta))
        self._backlog += 1 + len(delta.token_ids) + sum(map(len, delta.logprobs or ()))
        self._wake.set()
        if self._max_backlog is not None and self._backlog > self._max_backlog:
            self._abort()
            if self._on_overflow is not None:
                self._on_overflow()

    def _abort(self) -> None:
        """Abort what still runs; nothing more is taken in."""
        if self._closed:
            return
        self._closed = True
        if self._accepted:
            for timer in self._timers.values():
                timer.on_abort()
        self._abort_requests()

    def _abort_requests(self) -> None:
        for request in self._requests:
            self._client.abort(request.request_id)
