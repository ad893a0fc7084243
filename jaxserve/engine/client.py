"""The thread-safe face of the engine: the server and `LLM` submit requests here and get deltas.

    submit -> engine thread (token ids) -> text thread (text, stop strings) -> the caller's sink

Everything that can be refused is refused in `submit`, in the caller's thread, before the engine
hears of it.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.engine.engine_thread import EngineLike, EngineThread
from jaxserve.engine.outputs import GenerationRequest
from jaxserve.engine.request import Request
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.state_file import read_state, write_state
from jaxserve.engine.text_stream import TextTokenizer
from jaxserve.engine.text_thread import Sink, TextThread
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams, is_int

# How long shutdown waits for a step in progress; a hung engine is then left to the process's end.
STOP_SECONDS = 10.0


class EngineClient:
    """Runs an engine and its text side on two threads.

    max_inflight: choices open at once; above it `submit` raises QueueFullError. Keep it at or
    below what the engine itself can run and queue (max_batch_rows + max_queue). seed: root of the
    seeds of requests that bring none; the n-th such request always draws the same one.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: TextTokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        max_inflight: int,
    ) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._root_seed = seed
        self._seed_counter = itertools.count()
        self._closed_because: str | None = "the engine has not been started"
        self.max_inflight = max_inflight
        self._text = TextThread(
            tokenizer,
            max_open=max_inflight,
            finish_early=lambda choice_id, tokens: self._thread.finish(choice_id, tokens),
            abort=lambda choice_id: self._thread.abort(choice_id),
        )
        self._thread = EngineThread(engine, on_events=self._text.post, on_exit=self._text.close)

    def start(
        self, progress: Callable[[str], None] | None = None, *, wait_for_all: bool = True
    ) -> None:
        """Start both threads and the engine's warm-up, and return; see `wait_ready`.

        `progress` hears the phases of the warm-up, on other threads. Requests submitted meanwhile
        wait for its end. wait_for_all False: it ends as soon as the engine can answer, and the
        rest of the engine's programs are loaded while it serves (see Engine.warm_up).
        """
        self._closed_because = None
        self._text.start()
        self._thread.start(progress, wait_for_all=wait_for_all)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait for the end of warm-up. Raises EngineDeadError if it failed, or TimeoutError."""
        self._thread.wait_ready(timeout)

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError, with its cause, if the engine's thread has died of an error."""
        self._thread.raise_if_dead()

    def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let the open ones run for `drain_seconds`, abort the rest, stop.

        Every open choice has had its last delta when this returns. It may be called again, and
        from any thread but a sink's.
        """
        started = self._closed_because is None
        self._closed_because = "the engine is shutting down"
        if not started:
            return
        if drain_seconds > 0:
            self._text.wait_until_empty(drain_seconds)
        self._thread.stop()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive:
            self._text.close(TimeoutError(f"a step has not ended within {STOP_SECONDS:g} s"))
        self._text.join(STOP_SECONDS)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request; `sink` gets its deltas, on the text thread, and must not block.

        Each choice ends with exactly one delta that has a finish_reason. Raises
        InvalidRequestError, QueueFullError or EngineDeadError, and then no delta comes.
        """
        if self._closed_because is not None:
            raise EngineDeadError(self._closed_because)
        max_tokens = self.check(request.prompt_token_ids, request.params)
        choices = self._choices(request, max_tokens)
        self._text.open(request.request_id, choices, sink)
        for choice in choices:
            self._thread.add(choice)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Whether such a request can be served at all; returns its max_tokens, resolved.

        Raises InvalidRequestError naming the field, the value and the limit.
        """
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        self._check_tokens(prompt_token_ids, "prompt")
        params.check_against_model(self._vocab_size)
        if params.n > self.max_inflight:
            raise InvalidRequestError(
                f"n is {params.n}, but at most {self.max_inflight} choices can be open at once; "
                "ask several times for fewer",
                "n",
            )
        max_tokens = self._engine.check_admissible(len(prompt_token_ids), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but after {len(prompt_token_ids)} prompt "
                f"tokens there is room for {max_tokens}; lower min_tokens or shorten the prompt",
                "min_tokens",
            )
        return max_tokens

    def abort(self, request_id: str) -> None:
        """End a request's open choices: each gets an "abort" delta. Unknown or ended: nothing."""
        for choice_id in self._text.open_choice_ids(request_id):
            self._thread.abort(choice_id)

    # ------------------------------------------------------------------ runs (engine/run.py)

    def fork(
        self,
        parent: str,
        prompt_token_ids: Sequence[int],
        request_id: str,
        sink: Sink,
        *,
        params: SamplingParams | None = None,
        seed: int | None = None,
        at: int | None = None,
    ) -> tuple[Request, int]:
        """A copy of an open user request of one choice, with this prompt, as a new one; see
        RequestStates.fork.

        Returns it, and how many output tokens it inherited; its first delta brings them. Raises
        InvalidRequestError, QueueFullError or EngineDeadError, and then no delta comes. Not from a
        sink.
        """
        max_tokens = None if params is None else self.check(prompt_token_ids, params)
        if params is not None and seed is None:
            seed = params.seed
        return self._thread.enter(
            lambda: self._engine.states.fork(
                f"{parent}-0",
                f"{request_id}-0",
                params=params,
                max_tokens=max_tokens,
                seed=seed,
                at=at,
            ),
            lambda request: self._text.open(request_id, [request], sink),
        )

    def save(self, request_id: str, path: Path) -> RequestState:
        """Write the state of an open user request of one choice to a file; it goes on meanwhile.

        Raises InvalidRequestError if it has ended, OSError, EngineDeadError. Not from a sink.
        """
        states = self._engine.states
        copy = self._thread.call(lambda: states.copy_out(f"{request_id}-0"))
        state = copy.result(states.form)
        write_state(path, state, states.identity)
        return state

    def load(self, path: Path, request_id: str, sink: Sink) -> tuple[Request, int]:
        """Let a saved request go on as a new one; returns as `fork` does.

        Raises InvalidRequestError if the file or the request cannot be taken, and as `fork` does.
        """
        states = self._engine.states
        state = read_state(path, states.identity, states.form, self._engine.max_model_len)
        max_tokens = self.check(state.prompt_token_ids, state.params)
        self._check_tokens(state.output_token_ids, "saved output")
        request = Request(
            request_id=f"{request_id}-0",
            prompt_token_ids=state.prompt_token_ids,
            params=state.params,
            max_tokens=max_tokens,
            seed=state.seed,
            eos_token_ids=self._eos_token_ids,
            choice=state.choice,
            priority=state.priority,
            arrival_time=time.monotonic(),
            output_token_ids=list(state.output_token_ids),
            cache_salt=state.cache_salt,
        )
        return self._thread.enter(
            lambda: states.put_back(request, state.pages),
            lambda request: self._text.open(request_id, [request], sink),
        )

    def is_healthy(self, stall_seconds: float) -> bool:
        """Ready, both threads alive, and no step older than `stall_seconds` still unfinished."""
        return self._text.is_alive and self._thread.is_progressing(stall_seconds)

    @property
    def is_ready(self) -> bool:
        """Warm-up is done and the engine has not died since."""
        return self._thread.is_ready

    @property
    def num_inflight(self) -> int:
        """Choices submitted whose last delta has not been published."""
        return self._text.num_open

    def _check_tokens(self, token_ids: Sequence[int], where: str) -> None:
        for token in token_ids:
            if not is_int(token) or not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"the {where} holds the token id {_show(token)}; the model's vocabulary has "
                    f"{self._vocab_size} ids, whole numbers from 0 to {self._vocab_size - 1}",
                    "prompt",
                )

    def _choices(self, request: GenerationRequest, max_tokens: int) -> list[Request]:
        seed = request.params.seed
        if seed is None:
            seed = _draw_seed(self._root_seed, next(self._seed_counter))
        arrival_time = time.monotonic()
        timeout = request.timeout
        return [
            Request(
                request_id=f"{request.request_id}-{choice}",
                prompt_token_ids=tuple(request.prompt_token_ids),
                params=request.params,
                max_tokens=max_tokens,
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                choice=choice,
                priority=request.priority,
                arrival_time=arrival_time,
                cache_salt=request.cache_salt,
                leader_id=f"{request.request_id}-0" if choice else None,
                deadline=None if timeout is None else arrival_time + timeout,
            )
            for choice in range(request.params.n)
        ]


def _draw_seed(root: int, count: int) -> int:
    """A seed of 63 bits, independent for every (root, count)."""
    digest = hashlib.blake2b(f"{root}/{count}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _show(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:  # may be too long to print at all
        return f"(a whole number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
