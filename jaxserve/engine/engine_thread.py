"""The engine's own thread: it alone calls the engine, step after step, and sleeps when idle.

Other threads speak to it through an inbox; what it produces goes to `on_events`. It knows token
ids only: nothing of text, JSON or HTTP runs here.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from jaxserve.engine.request import Request, TokenEvent
from jaxserve.engine.request_states import RequestStates
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the client needs of an engine. All calls from one thread, `check_admissible` excepted.

    add raises InvalidRequestError or QueueFullError. abort of an unknown id does nothing; of a
    known one, the next step emits its last event, finish_reason "abort". finish ends a request
    after `token_index` output tokens (a stop string was found late) and emits nothing more.
    step runs one iteration; it raises only what it cannot recover from.
    check_admissible resolves max_tokens (None: what the context leaves) and raises
    InvalidRequestError for what can never be served. close is the last call. states is for those
    who fork, save and load requests, and only they need it.
    """

    max_model_len: int
    capacity_tokens: int
    states: RequestStates

    @property
    def has_work(self) -> bool: ...
    def warm_up(
        self, progress: Callable[[str], None] | None = None, *, wait_for_all: bool = True
    ) -> None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def finish(self, request_id: str, token_index: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def check_admissible(self, num_prompt_tokens: int, max_tokens: int | None) -> int: ...
    def close(self) -> None: ...


class EngineThread:
    """Runs warm-up and then steps until `stop()`, or until the engine raises.

    on_events gets the events of each step in order; on_exit is called once, last of all, with
    the error the thread died of (None after `stop()`).
    """

    def __init__(
        self,
        engine: EngineLike,
        *,
        on_events: Callable[[list[TokenEvent]], None],
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_exit = on_exit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: set[str] = set()  # requests whose last event has not been seen
        self._calls = PendingCalls()
        self._stopping = False
        self._busy_since: float | None = None
        self._ready = False
        self._settled = threading.Event()  # warm-up is over, well or badly
        self._error: BaseException | None = None
        self._warm_up: Callable[[], None] = engine.warm_up
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    def start(
        self, progress: Callable[[str], None] | None = None, *, wait_for_all: bool = True
    ) -> None:
        """Start warm-up in the background; `progress` hears its phases, on other threads.

        wait_for_all False: the engine is ready once it can answer at all (see Engine.warm_up).
        """
        self._warm_up = partial(self._engine.warm_up, progress, wait_for_all=wait_for_all)
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return when warm-up is done; raises EngineDeadError if it failed, TimeoutError."""
        if not self._settled.wait(timeout):
            raise TimeoutError(f"the engine is not ready after {timeout:g} s")
        self.raise_if_dead()

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if an error has ended the thread."""
        if self._error is not None:
            raise EngineDeadError(describe_death(self._error)) from self._error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Warm-up is done and the thread is alive."""
        return self._ready and self._thread.is_alive()

    def is_progressing(self, stall_seconds: float) -> bool:
        """Ready, and idle or with a step completed within the last `stall_seconds`."""
        since = self._busy_since
        return self.is_ready and (since is None or time.monotonic() - since <= stall_seconds)

    def add(self, request: Request) -> None:
        """Hand a request to the engine; a refusal comes back as its "error" event."""
        self._inbox.put(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End a request early: its "abort" event follows, unless it has ended before."""
        self._inbox.put(partial(self._abort, request_id))

    def finish(self, request_id: str, token_index: int) -> None:
        """The text side ended a request after `token_index` tokens; nothing if it has ended."""
        self._inbox.put(partial(self._finish, request_id, token_index))

    def call[T](self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread, between two steps, and return what it returns or
        raise what it raises; EngineDeadError if the thread ends before. Not from a sink."""
        answer: Future[T] = Future()
        with self._calls.waiting_for(answer):
            self._inbox.put(partial(self._answer, answer, work))
            return answer.result()

    def enter(
        self, add: Callable[[], Request], announce: Callable[[Request], None]
    ) -> tuple[Request, int]:
        """Let `add` queue a request that has output already, and `announce` it before its first
        event, which brings that output. Returns it, and how many output tokens it has.

        Both run on the engine's thread; what they raise is raised here, and nothing is queued then.
        """

        def work() -> tuple[Request, int]:
            if self._stopping:
                raise EngineDeadError("the engine is shutting down")
            request = add()
            try:
                announce(request)
            except BaseException:
                self._engine.abort(request.request_id)
                raise
            self._live.add(request.request_id)
            output = tuple(request.output_token_ids)
            if output:
                self._on_events([TokenEvent(request.request_id, output, None)])
            return request, len(output)

        return self.call(work)

    def stop(self) -> None:
        """Abort what is running, emit its last events, then end the thread."""
        self._inbox.put(self._stop)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, at most `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._warm_up()
            self._ready = True
            self._settled.set()
            self._loop()
        except BaseException as error:  # whatever ends this thread must reach the users
            logger.exception("the engine's thread has died")
            self._error = error
        finally:
            self._settled.set()
            self._calls.end(self._error)
            self._on_exit(self._error)
            self._engine.close()

    def _loop(self) -> None:
        while not (self._stopping and not self._live):
            self._read_inbox()
            if self._engine.has_work:
                events = self._engine.step()
                self._live.difference_update(e.request_id for e in events if e.finish_reason)
                if events:
                    self._on_events(events)
                self._busy_since = time.monotonic()
            elif self._stopping:
                return

    def _read_inbox(self) -> None:
        """Do what the other threads asked for; sleep until they ask if there is nothing to run."""
        if not self._engine.has_work and not self._stopping:
            self._busy_since = None
            message = self._inbox.get()
            self._busy_since = time.monotonic()
            message()
        while not self._inbox.empty():
            self._inbox.get()()

    def _add(self, request: Request) -> None:
        if self._stopping:  # came after the stop: it ends with everything else that is open
            return
        try:
            self._engine.add(request)
        except (InvalidRequestError, QueueFullError) as error:
            refusal = TokenEvent(request.request_id, (), None, "error", error=str(error))
            self._on_events([refusal])
        else:
            self._live.add(request.request_id)

    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._engine.abort(request_id)
        else:  # it has ended, and the text side drops this; or its add was interrupted
            self._on_events([TokenEvent(request_id, (), None, "abort")])

    def _finish(self, request_id: str, token_index: int) -> None:
        if request_id in self._live:
            self._live.discard(request_id)
            self._engine.finish(request_id, token_index)

    def _answer[T](self, answer: Future[T], work: Callable[[], T]) -> None:
        if not answer.set_running_or_notify_cancel():  # who asked has been interrupted
            return
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)
            if isinstance(error, EngineDeadError) and not self._stopping:
                raise

    def _stop(self) -> None:
        self._stopping = True
        for request_id in self._live:
            self._engine.abort(request_id)


class PendingCalls:
    """Who waits for an answer of the engine's thread: nobody does so after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both below
        self._answers: set[Future[Any]] = set()
        self._ended_because: str | None = None

    @contextmanager
    def waiting_for(self, answer: Future[Any]) -> Iterator[None]:
        """Raises EngineDeadError if nobody will answer."""
        with self._lock:
            if self._ended_because is not None:
                raise EngineDeadError(self._ended_because)
            self._answers.add(answer)
        try:
            yield
        finally:
            answer.cancel()
            with self._lock:
                self._answers.discard(answer)

    def end(self, error: BaseException | None) -> None:
        """The thread has ended: whoever still waits hears of it."""
        text = "the engine has been shut down" if error is None else describe_death(error)
        with self._lock:
            self._ended_because = text
            for answer in self._answers:
                if not answer.done():
                    answer.set_exception(EngineDeadError(text))


def describe_death(error: BaseException) -> str:
    """One line for users; the traceback is in the log."""
    text = str(error).strip().partition("\n")[0][:200]
    name = type(error).__name__
    return (
        f"the engine has stopped ({name}: {text})" if text else f"the engine has stopped ({name})"
    )
