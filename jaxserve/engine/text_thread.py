"""The text side's thread: it owns the TextStreams and calls the sinks of the users.

Every open choice lives in one table here, from `open` to its last delta, and is taken out of it
exactly once; that is what makes results arrive exactly once, whatever ends a request and however
often. The engine's thread only puts events into a queue.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.engine.engine_thread import describe_death
from jaxserve.engine.outputs import OutputDelta
from jaxserve.engine.request import Request, TokenEvent
from jaxserve.engine.text_stream import TextStream, TextTokenizer
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)

Sink = Callable[[OutputDelta], None]

# Steps the text side may lag behind before the engine waits for it: bounds the memory, and is
# far more than a working text side ever needs.
MAX_QUEUED_STEPS = 1024


@dataclass(eq=False)
class _UserRequest:
    """What the choices of one user request share."""

    request_id: str
    sink: Sink
    open_choices: dict[str, "_Choice"] = field(default_factory=dict)


@dataclass(eq=False)
class _Choice:
    request: Request
    user_request: _UserRequest
    stream: TextStream | None = None  # made at the first event, on the text thread


@dataclass(frozen=True)
class _Close:
    """The last message: no events will follow."""

    error: BaseException | None


class TextThread:
    """Turns events into deltas. `finish_early(choice id, tokens)` ends a request whose stop string
    was found here; `abort(choice id)` one whose sink or text failed.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_open: int,
        finish_early: Callable[[str, int], None],
        abort: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._finish_early = finish_early
        self._abort = abort
        self._events: queue.Queue[list[TokenEvent] | _Close] = queue.Queue(MAX_QUEUED_STEPS)
        self._lock = threading.Lock()  # guards the table: _choices, _requests, _closed
        self._choices: dict[str, _Choice] = {}
        self._requests: dict[str, _UserRequest] = {}
        self._closed: str | None = None
        self._all_done = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="jaxserve-text", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Choices whose last delta has not been given to their sink."""
        return len(self._choices)

    def open(self, request_id: str, choices: Sequence[Request], sink: Sink) -> None:
        """Enter a user request's choices into the table, all or none.

        Raises EngineDeadError, QueueFullError (retry later) or InvalidRequestError (the id is in
        use).
        """
        with self._lock:
            if self._closed is not None:
                raise EngineDeadError(self._closed)
            if request_id in self._requests:
                raise InvalidRequestError("a request with this id is running", "request_id")
            if len(self._choices) + len(choices) > self._max_open:
                raise QueueFullError(
                    f"{len(self._choices)} of at most {self._max_open} requests are open; "
                    "try again later"
                )
            user_request = _UserRequest(request_id, sink)
            for request in choices:
                choice = _Choice(request, user_request)
                user_request.open_choices[request.request_id] = choice
                self._choices[request.request_id] = choice
            self._requests[request_id] = user_request

    def open_choice_ids(self, request_id: str) -> list[str]:
        """The engine ids of a user request's choices that have not ended; [] if unknown."""
        with self._lock:
            user_request = self._requests.get(request_id)
            return [] if user_request is None else list(user_request.open_choices)

    def post(self, events: list[TokenEvent]) -> None:
        """Queue the events of one step (the engine's thread calls this)."""
        self._events.put(events)

    def close(self, error: BaseException | None) -> None:
        """No events will follow: what is open ends as "error", or as "abort" without an error."""
        self._events.put(_Close(error))

    def wait_until_empty(self, timeout: float) -> bool:
        """Wait until no choice is open, at most `timeout` seconds; whether that came true."""
        with self._all_done:
            return self._all_done.wait_for(lambda: not self._choices, timeout)

    def join(self, timeout: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            message = self._events.get()
            if isinstance(message, _Close):
                self._end_all(message.error)
                return
            for event in message:
                self._handle(event)

    def _handle(self, event: TokenEvent) -> None:
        choice = self._choices.get(event.request_id)
        if choice is None:  # it has ended here: surplus tokens of a late stop, or a second end
            return
        try:
            delta = self._delta(choice, event)
        except Exception:
            logger.exception("request %s: its text could not be made", event.request_id)
            delta = self._last_delta(choice, "error", "the output could not be turned into text")
        ended = delta.finish_reason is not None
        if ended and event.finish_reason is None:
            self._end_in_engine(choice, delta)
        if ended:
            self._remove([choice])
        self._give(choice, delta)

    def _delta(self, choice: _Choice, event: TokenEvent) -> OutputDelta:
        if choice.stream is None:
            request = choice.request
            choice.stream = TextStream(
                self._tokenizer,
                request.prompt_token_ids,
                request.params,
                choice.user_request.request_id,
                request.choice,
            )
        return choice.stream.push(event)

    def _end_in_engine(self, choice: _Choice, delta: OutputDelta) -> None:
        if delta.finish_reason == "stop" and choice.stream is not None:
            self._finish_early(choice.request.request_id, choice.stream.num_tokens)
        else:
            self._abort(choice.request.request_id)

    def _give(self, choice: _Choice, delta: OutputDelta) -> None:
        """Call the sink. One that raises has lost its request: aborted, and never called again."""
        user_request = choice.user_request
        try:
            user_request.sink(delta)
        except Exception:
            logger.exception("request %s: its sink failed", user_request.request_id)
            lost = list(user_request.open_choices.values())
            self._remove(lost)
            for other in lost:
                self._abort(other.request.request_id)

    def _last_delta(self, choice: _Choice, reason: str, error: str | None) -> OutputDelta:
        return OutputDelta(
            request_id=choice.user_request.request_id,
            index=choice.request.choice,
            text="",
            token_ids=(),
            logprobs=None if choice.request.params.logprobs is None else (),
            finish_reason=reason,
            error=error,
        )

    def _remove(self, choices: Sequence[_Choice]) -> None:
        with self._all_done:
            for choice in choices:
                self._choices.pop(choice.request.request_id, None)
                user_request = choice.user_request
                user_request.open_choices.pop(choice.request.request_id, None)
                if not user_request.open_choices:
                    self._requests.pop(user_request.request_id, None)
            if not self._choices:
                self._all_done.notify_all()

    def _end_all(self, error: BaseException | None) -> None:
        text = "the engine has been shut down" if error is None else describe_death(error)
        with self._lock:
            self._closed = text
            left = list(self._choices.values())
        for choice in left:
            event = TokenEvent(choice.request.request_id, (), None, "abort")
            if error is not None:
                event = TokenEvent(choice.request.request_id, (), None, "error", error=text)
            self._handle(event)
