"""Runs the requests of a call and answers it, as one response or as a stream of chunks."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import OutputDelta
from jaxserve.errors import QueueFullError
from jaxserve.server.calls import Call, raise_if_only_timed_out
from jaxserve.server.errors import ApiError, as_api_error, generation_failed, unavailable
from jaxserve.server.generation import Generation
from jaxserve.server.prompt_echo import PromptFirst
from jaxserve.server.responses import merge_deltas
from jaxserve.server.settings import MAX_STREAM_BACKLOG
from jaxserve.server.state import ServerState
from jaxserve.server.streaming import EventStream, cut, encode_json

logger = logging.getLogger(__name__)

# With logprobs for more tokens than this, prompts' too, the pure-Python encoder is used:
# slower, but it lets the event loop run, where the C encoder would hold the GIL to its end.
_LARGE_ANSWER_TOKENS = 20_000


@dataclass(frozen=True)
class Answer:
    """One call and the connection that waits for its answer."""

    request: web.Request
    state: ServerState
    client: EngineClient
    call: Call
    arrival: float  # time.monotonic() at the start of the handler

    async def run(self) -> web.StreamResponse:
        """The response, whole or streamed. Raises what `errors.as_api_error` knows."""
        generation = Generation(
            self.client,
            self.call.prepared.requests,
            self.state.metrics,
            self.arrival,
            self.state.executor,
            max_backlog=MAX_STREAM_BACKLOG if self.call.options.stream else None,
            on_overflow=self._drop_slow_reader,
        )
        try:
            async with generation:
                for request in self.call.prepared.requests:
                    self.state.metrics.on_request(request.params)
                if self.call.options.stream:
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
        body = await self.state.in_thread(self._encode, parts)
        return web.Response(body=body, content_type="application/json")

    def _encode(self, parts: Sequence[Sequence[OutputDelta]]) -> bytes:
        response = self.call.response(parts)
        params, num_tokens = self.call.options.params, 0
        if params.logprobs is not None:
            num_tokens += response["usage"]["completion_tokens"]
        if params.prompt_logprobs is not None:
            num_tokens += self.call.prepared.num_prompt_tokens * params.n
        return _encode(response, num_tokens)

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
        for opening in self.call.form.openings():
            await self._send(stream, opening)
        num_tokens = 0
        cached = [0] * generation.num_choices
        ends: list[tuple[int, OutputDelta]] = []  # timeouts before the first token of the call
        hold = PromptFirst(self.call.options.params.n)
        begun: set[int] = set()
        while not generation.finished:
            batch = _joined(await generation.next())
            if self.call.form.shows_prompts_first:
                batch = hold.pass_on(batch)
            for choice, delta in batch:
                self._raise_if_failed(delta)
                delta = self.call.shown(delta)
                num_tokens += len(delta.token_ids)
                cached[choice] = max(cached[choice], delta.num_cached_tokens)
                if delta.finish_reason == "timeout" and num_tokens == 0:
                    ends.append((choice, delta))
                elif self._says_something(delta):
                    await self._send_choice(stream, choice, delta, first=choice not in begun)
                    begun.add(choice)
        if num_tokens == 0:
            raise_if_only_timed_out([delta for _, delta in ends])
        for choice, delta in ends:
            await self._send(stream, self.call.form.choice_chunk(choice, delta))
        if self.call.options.include_usage:
            await stream.send(
                self.call.form.chunk([]) | {"usage": self.call.usage(num_tokens, cached)}
            )
        await stream.done()

    async def _send_choice(
        self, stream: EventStream, choice: int, delta: OutputDelta, *, first: bool
    ) -> None:
        """Send a chunk. The first one may hold logprobs of a whole prompt: a worker makes it."""
        if first and self.call.asks_for_prompt_logprobs:
            await stream.send_text(await self.state.in_thread(self._encode_chunk, choice, delta))
        else:
            await self._send(stream, self.call.form.choice_chunk(choice, delta))

    def _encode_chunk(self, choice: int, delta: OutputDelta) -> bytes:
        chunk = self.call.form.choice_chunk(choice, delta)
        if self.call.options.include_usage:
            chunk["usage"] = None
        return _encode(chunk, self.call.prepared.num_prompt_tokens)

    async def _send(self, stream: EventStream, chunk: dict[str, Any]) -> None:
        if self.call.options.include_usage:
            chunk["usage"] = None
        await stream.send(chunk)

    def _says_something(self, delta: OutputDelta) -> bool:
        shows_ids = self.call.options.return_token_ids and delta.token_ids
        return bool(
            delta.text
            or delta.finish_reason
            or delta.logprobs
            or delta.prompt_logprobs is not None
            or shows_ids
        )

    def _raise_if_failed(self, delta: OutputDelta) -> None:
        if delta.finish_reason == "error":
            if not self.client.is_healthy(float("inf")):
                raise unavailable(delta.error or "the engine has stopped", "engine_dead")
            raise generation_failed(delta.error)


def _encode(answer: dict[str, Any], num_tokens: int) -> bytes:
    """JSON of an answer or chunk with logprobs of so many tokens."""
    if num_tokens < _LARGE_ANSWER_TOKENS:
        return encode_json(answer).encode()
    pieces = json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(answer)
    return "".join(pieces).encode()


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
