"""An engine without a model: it emits scripted token ids, and can be made to fail or to freeze.

It keeps the promises of `jaxserve.engine.engine_thread.EngineLike` and is strict about the
caller's: one thread only, no finish of an unknown request, every request freed exactly once.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxserve.engine.outputs import StepStats
from jaxserve.engine.request import PromptLogprobs, Request, TokenEvent, TokenLogprobs
from jaxserve.errors import InvalidRequestError, QueueFullError

Script = (
    Sequence[int] | Mapping[tuple[int, ...], Sequence[int]] | Callable[[Request], Sequence[int]]
)


class FakeEngine:
    """Emits the script one token per request and step (`tokens_per_step` of them at once).

    script: the output ids, the same for all requests, by prompt ids, or as a function. After its
    end the EOS id follows; a request without one, or with ignore_eos, hears the script again.
    step_gate: while this event is cleared, step() hangs. warm_up_gate: the same for warm_up().
    fail_at_step: step number (from 1) that raises. step_seconds: time a step takes.
    """

    def __init__(
        self,
        script: Script,
        *,
        max_model_len: int = 4096,
        capacity_tokens: int = 1 << 20,
        max_rows: int = 16,
        max_queue: int = 1024,
        tokens_per_step: int = 1,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        warm_up_error: Exception | None = None,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        self.script = script
        self.max_model_len = max_model_len
        self.capacity_tokens = capacity_tokens
        self.max_rows = max_rows
        self.max_queue = max_queue
        self.tokens_per_step = tokens_per_step
        self.step_seconds = step_seconds
        self.fail_at_step = fail_at_step
        self.warm_up_error = warm_up_error
        self.on_step = on_step
        self.step_gate = threading.Event()
        self.step_gate.set()
        self.warm_up_gate = threading.Event()
        self.warm_up_gate.set()
        self.num_steps = 0
        self.added: list[Request] = []  # every request ever accepted, in order
        self.freed: collections.Counter[str] = collections.Counter()
        self.finished_at: dict[str, int] = {}  # token_index of each finish() call
        self.max_open = 0
        self._open: dict[str, Request] = {}
        self._emitted: dict[str, int] = {}
        self._aborted: list[str] = []
        self._thread: int | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._open) or bool(self._aborted)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def warm_up(
        self, progress: Callable[[str], None] | None = None, *, wait_for_all: bool = True
    ) -> None:
        self._check_thread()
        if progress is not None:
            progress("warming up")
        self.warm_up_gate.wait()
        if self.warm_up_error is not None:
            raise self.warm_up_error

    def close(self) -> None:
        self._check_thread()

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        if num_prompt_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; the context length is "
                f"{self.max_model_len}, and at least one must be left for the output",
                "prompt",
            )
        resolved = self.max_model_len - num_prompt_tokens if max_tokens is None else max_tokens
        if num_prompt_tokens + resolved > self.max_model_len:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {resolved} exceed the context "
                f"length {self.max_model_len}",
                "max_tokens",
            )
        if num_prompt_tokens + resolved > self.capacity_tokens:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {resolved} can never fit the "
                f"KV pool of {self.capacity_tokens} tokens",
                "max_tokens",
            )
        return resolved

    def add(self, request: Request) -> None:
        self._check_thread()
        if len(self._open) >= self.max_rows + self.max_queue:
            raise QueueFullError(f"{len(self._open)} requests are open")
        assert request.request_id not in self._open, f"{request.request_id} added twice"
        self.added.append(request)
        self._open[request.request_id] = request
        self._emitted[request.request_id] = 0
        self.max_open = max(self.max_open, len(self._open))

    def abort(self, request_id: str) -> None:
        self._check_thread()
        if request_id in self._open:
            self._free(request_id)
            self._aborted.append(request_id)

    def finish(self, request_id: str, token_index: int) -> None:
        self._check_thread()
        emitted = self._emitted[request_id]
        assert request_id in self._open, f"finish of {request_id}, which is not open"
        assert 1 <= token_index <= emitted, f"finish at {token_index} of {emitted} tokens"
        self.finished_at[request_id] = token_index
        self._free(request_id)

    def step(self) -> list[TokenEvent]:
        self._check_thread()
        assert self.has_work, "step without work"
        self.num_steps += 1
        self.step_gate.wait()
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("the device is gone")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        events = [TokenEvent(rid, (), None, finish_reason="abort") for rid in self._aborted]
        self._aborted.clear()
        events += self._expire()
        running = list(self._open.values())[: self.max_rows]
        events += [self._advance(request) for request in running]
        if self.on_step is not None:
            self.on_step(self._stats(len(running), sum(len(e.token_ids) for e in events)))
        return events

    def _expire(self) -> list[TokenEvent]:
        """End what is past its deadline, running or waiting."""
        now = time.monotonic()
        late = [r for r in self._open.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self._free(request.request_id)
        return [TokenEvent(r.request_id, (), None, finish_reason="timeout") for r in late]

    def _advance(self, request: Request) -> TokenEvent:
        rid, params = request.request_id, request.params
        prompt = self._prompt_logprobs(request) if not self._emitted[rid] else None
        ids: list[int] = []
        finish_reason: str | None = None
        stop_reason: int | None = None
        while len(ids) < self.tokens_per_step and finish_reason is None:
            token = self._token(request, self._emitted[rid])
            ids.append(token)
            self._emitted[rid] += 1
            past_minimum = self._emitted[rid] > params.min_tokens
            if token in request.eos_token_ids and not params.ignore_eos and past_minimum:
                finish_reason = "stop"
            elif token in params.stop_token_ids and past_minimum:
                finish_reason, stop_reason = "stop", token
            elif self._emitted[rid] >= request.max_tokens:
                finish_reason = "length"
        if finish_reason is not None:
            self._free(rid)
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(self._logprobs(token, params.logprobs) for token in ids)
        return TokenEvent(
            rid, tuple(ids), logprobs, finish_reason, stop_reason, prompt_logprobs=prompt
        )

    def _token(self, request: Request, position: int) -> int:
        script = self.script
        if callable(script):
            script = script(request)
        elif isinstance(script, Mapping):
            script = script[request.prompt_token_ids]
        if position == len(script) and request.eos_token_ids and not request.params.ignore_eos:
            return request.eos_token_ids[0]
        return script[position % len(script)]

    @staticmethod
    def _logprobs(token: int, num_top: int) -> TokenLogprobs:
        """Rank 2 for the token itself, so that it is inside the alternatives when there are two."""
        others = [i for i in range(num_top + 1) if i != token]
        ranked = ([*others[:1], token, *others[1:]])[:num_top]
        top = tuple((i, -0.5 * (rank + 1)) for rank, i in enumerate(ranked))
        return TokenLogprobs(-1.0, 2, top)

    @staticmethod
    def _prompt_logprobs(request: Request) -> PromptLogprobs | None:
        """Token i of the prompt has the logprob -i and rank 2, ids 0, 1, ... the ranks but that."""
        num_top = request.params.prompt_logprobs
        if num_top is None or request.leader_id is not None:
            return None
        ids = np.array(request.prompt_token_ids[1:], np.int32)
        number = np.arange(1, len(ids) + 1, dtype=np.int32)
        top = [[i for i in range(num_top + 1) if i != token] for token in ids]
        ranked = [
            ([*others[:1], token, *others[1:]])[:num_top]
            for token, others in zip(ids, top, strict=True)
        ]
        shape = (len(ids), num_top)
        values = -number[:, None] + np.where(np.arange(num_top) == 0, 0.5, 1 - np.arange(num_top))
        return PromptLogprobs(
            ids,
            -number.astype(np.float32),
            np.full(len(ids), 2, np.int32),
            np.array(ranked, np.int32).reshape(shape),
            values.astype(np.float32).reshape(shape),
        )

    def _free(self, request_id: str) -> None:
        del self._open[request_id]
        self.freed[request_id] += 1

    def _check_thread(self) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        assert thread == self._thread, "the engine was called from a second thread"

    def _stats(self, num_running: int, output_tokens: int) -> StepStats:
        return StepStats(
            num_running=num_running,
            num_waiting=len(self._open) - min(num_running, len(self._open)),
            pages_used=num_running,
            pages_total=64,
            prompt_tokens=0,
            step_tokens=0,
            output_tokens=output_tokens,
            num_preemptions=0,
            host_seconds=0.001,
            device_seconds=self.step_seconds,
            bucket="fake",
            late_compiles=0,
        )
