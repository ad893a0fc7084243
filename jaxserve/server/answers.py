"""Runs the requests of a call and answers it, as one response or as a stream of chunks."""

import json
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import OutputDelta
from jaxserve.errors import QueueFullError
from jaxserve.server.errors import (
    ApiError,
    as_api_error,
    generation_failed,
    timed_out,
    unavailable,
)
from jaxserve.server.generation import Generation
from jaxserve.server.prompts import PreparedCall
from jaxserve.server.protocol import CallOptions
from jaxserve.server.responses import AnswerFormat, Envelope, merge_deltas, usage_fields
from jaxserve.server.settings import MAX_STREAM_BACKLOG
from jaxserve.server.state import ServerState
from jaxserve.server.streaming import EventStream, cut, encode_json

logger = logging.getLogger(__name__)

# With logprobs for more tokens than this the pure-Python encoder is used: slower, but it lets the
# event loop run, where the C encoder would hold the GIL to its end.
_LARGE_ANSWER_TOKENS = 20_000


@dataclass(frozen=True)
class Answer:
    """One call ready to run."""

    request: web.Request
    state: ServerState
    client: EngineClient
    options: CallOptions
    prepared: PreparedCall
    form: AnswerFormat
    arrival: float  # time.monotonic() at the start of the handler

    async def run(self) -> web.StreamResponse:
        """The response, whole or streamed. Raises what `errors.as_api_error` knows."""
        generation = Generation(
            self.client,
            self.prepared.requests,
            self.state.metrics,
            self.arrival,
            self.state.executor,
            max_backlog=MAX_STREAM_BACKLOG if self.options.stream else None,
            on_overflow=self._drop_slow_reader,
        )
        try:
            async with generation:
                for request in self.prepared.requests:
                    self.state.metrics.on_request(request.params)
                if self.options.stream:
                    return await self._stream(generation)
                return await self._whole(generation)
        except QueueFullError:
            self.state.metrics.rejections.inc()
            raise

    async def _whole(self, generation: Generation) -> web.Response:
        parts: list[list[OutputDelta]] = [[] for _ in range(generation.num_choices)]
        while not generation.finished:
            for choice, delta in await generation.next():
                self._raise_if_failed(delta)
                parts[choice].append(delta)
        self._raise_if_only_timed_out([delta for deltas in parts for delta in deltas])
        body = await self.state.in_thread(self._encode, parts)
        return web.Response(body=body, content_type="application/json")

    def _encode(self, parts: Sequence[Sequence[OutputDelta]]) -> bytes:
        wholes = [merge_deltas(deltas) for deltas in parts]
        usage = self._usage(
            sum(len(whole.token_ids) for whole in wholes),
            [whole.num_cached_tokens for whole in wholes],
        )
        response = self.form.response(wholes, usage)
        if (
            self.options.params.logprobs is None
            or usage["completion_tokens"] < _LARGE_ANSWER_TOKENS
        ):
            return encode_json(response).encode()
        pieces = json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(response)
        return "".join(pieces).encode()

    async def _stream(self, generation: Generation) -> web.StreamResponse:
        stream = EventStream(self.request, self.state.settings.write_timeout)
        try:
            await stream.open()
            await self._send_all(stream, generation)
        except ConnectionError:
            pass  # the client hung up; leaving the generation's context aborts it
        except Exception as error:
            await _try_to_fail(stream, as_api_error(error))
        return stream.response

    def _drop_slow_reader(self) -> None:
        """End the connection; the handler, which waits for it to take bytes, is cancelled."""
        logger.warning("a client read its stream too slowly and was dropped")
        cut(self.request)

    async def _send_all(self, stream: EventStream, generation: Generation) -> None:
        for opening in self.form.openings():
            await self._send(stream, opening)
        num_tokens = 0
        cached = [0] * generation.num_choices
        ends: list[tuple[int, OutputDelta]] = []  # timeouts before the first token of the call
        while not generation.finished:
            for choice, delta in _joined(await generation.next()):
                self._raise_if_failed(delta)
                num_tokens += len(delta.token_ids)
                cached[choice] = max(cached[choice], delta.num_cached_tokens)
                if delta.finish_reason == "timeout" and num_tokens == 0:
                    ends.append((choice, delta))
                elif self._says_something(delta):
                    await self._send(stream, self.form.choice_chunk(choice, delta))
        if num_tokens == 0:
            self._raise_if_only_timed_out([delta for _, delta in ends])
        for choice, delta in ends:
            await self._send(stream, self.form.choice_chunk(choice, delta))
        if self.options.include_usage:
            await stream.send(self.form.chunk([]) | {"usage": self._usage(num_tokens, cached)})
        await stream.done()

    async def _send(self, stream: EventStream, chunk: dict[str, Any]) -> None:
        if self.options.include_usage:
            chunk["usage"] = None
        await stream.send(chunk)

    def _says_something(self, delta: OutputDelta) -> bool:
        shows_ids = self.options.return_token_ids and delta.token_ids
        return bool(delta.text or delta.finish_reason or delta.logprobs or shows_ids)

    def _raise_if_failed(self, delta: OutputDelta) -> None:
        if delta.finish_reason == "error":
            if not self.client.is_healthy(float("inf")):
                raise unavailable(delta.error or "the engine has stopped", "engine_dead")
            raise generation_failed(delta.error)

    def _raise_if_only_timed_out(self, deltas: Sequence[OutputDelta]) -> None:
        """An answer without a single token is none: the caller hears why."""
        if any(delta.finish_reason == "timeout" for delta in deltas) and not any(
            delta.token_ids for delta in deltas
        ):
            raise timed_out()

    def _usage(self, num_tokens: int, cached: Sequence[int]) -> dict[str, Any]:
        # Of each prompt its first choice: the others find what that one has computed.
        first_choices = cached[:: self.options.params.n]
        return usage_fields(self.prepared.num_prompt_tokens, num_tokens, sum(first_choices))


async def _try_to_fail(stream: EventStream, error: ApiError) -> None:
    try:
        await stream.fail(error)
    except ConnectionError:
        logger.info("a stream failed after its client had gone")


def _joined(batch: Sequence[tuple[int, OutputDelta]]) -> list[tuple[int, OutputDelta]]:
    """Merge what came of each choice while the client was not reading into one delta.

    Errors stay apart and come last: what was drawn before them is still sent.
    """
    by_choice: dict[int, list[OutputDelta]] = {}
    errors = []
    for choice, delta in batch:
        if delta.finish_reason == "error":
            errors.append((choice, delta))
        else:
            by_choice.setdefault(choice, []).append(delta)
    return [(choice, merge_deltas(deltas)) for choice, deltas in by_choice.items()] + errors


def make_envelope(prefix: str, model: str) -> Envelope:
    """A fresh id, and the time as clients expect it (wall clock, seconds)."""
    return Envelope(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)
