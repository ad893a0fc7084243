"""One streamed request of a load generator, timed: any OpenAI-compatible server will do.

Times come from one monotonic clock. The first token is the first non-empty delta of any channel
(text, reasoning, tool calls), not the first chunk: many servers open with an empty role chunk.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxserve.bench.workload import BenchRequest

MAX_EVENT_BYTES = 16 << 20
_MAX_REASON_CHARS = 200
_CHANNELS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass(frozen=True)
class Target:
    """Where requests go. `fields` are added to every body (model, sampling)."""

    url: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.url.rstrip("/").endswith("/chat/completions")


@dataclass(frozen=True)
class Chunk:
    """A delta with something in it; tokens is None where the server does not say how many."""

    time: float
    tokens: int | None


@dataclass
class Outcome:
    """What happened to one request; times are perf_counter seconds. error None: it succeeded."""

    started: float
    finished: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # from the server's usage
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        return self.chunks[0].time if self.chunks else None

    @property
    def num_output_tokens(self) -> int:
        """Tokens by the server's usage; chunks are counted only where it reports none."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens


class _StreamError(Exception):
    pass


async def send(session: aiohttp.ClientSession, target: Target, request: BenchRequest) -> Outcome:
    """Send one request and read its stream to the end. Failures are in the outcome, not raised."""
    body = request_body(target, request)
    outcome = Outcome(started=time.perf_counter(), prompt_tokens=request.prompt_tokens)
    try:
        async with session.post(target.url, json=body, headers=target.headers) as response:
            if response.status != 200:
                text = (await response.content.read(4096)).decode("utf-8", "replace")
                raise _StreamError(f"HTTP {response.status}: {' '.join(text.split())}")
            await _read_stream(response, outcome)
    except _StreamError as error:
        outcome.error = str(error)[:_MAX_REASON_CHARS]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        outcome.error = f"not an OpenAI stream: {error!r}"[:_MAX_REASON_CHARS]
    return outcome


def request_body(target: Target, request: BenchRequest) -> dict[str, Any]:
    """The JSON body, for the endpoint the target names."""
    body: dict[str, Any] = dict(target.fields, max_tokens=request.max_tokens, stream=True)
    body["stream_options"] = {"include_usage": True}
    if target.is_chat:
        body["messages"] = list(
            request.messages or ({"role": "user", "content": request.text or ""},)
        )
    elif request.token_ids is not None:
        body["prompt"] = list(request.token_ids)
    else:
        body["prompt"] = request.text or "\n".join(
            str(message.get("content", "")) for message in request.messages or ()
        )
    return body


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    counted = 0
    ended = False
    async for arrived, data in _events(response):
        if data == "[DONE]":
            ended = True
            outcome.finished = outcome.finished or arrived
            continue
        event = json.loads(data)
        if event.get("error"):
            raise _StreamError(f"error in the stream: {json.dumps(event['error'])}")
        usage = event.get("usage")
        if usage:
            outcome.output_tokens = int(usage["completion_tokens"])
            outcome.prompt_tokens = int(usage["prompt_tokens"])
        for choice in event.get("choices") or ():
            if _says_something(choice):
                tokens = None
                if usage:  # a running count with every chunk: exact, whatever the chunk holds
                    tokens = int(usage["completion_tokens"]) - counted
                    counted += tokens
                outcome.chunks.append(Chunk(arrived, tokens))
            ended = ended or choice.get("finish_reason") is not None
            outcome.finished = arrived
    if not ended:
        raise _StreamError("the stream broke off before it was finished")


def _says_something(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(channel) for channel in _CHANNELS)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, str]]:
    """Server-sent events as (arrival time, data)."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        arrived = time.perf_counter()
        buffer += piece
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).strip()
            del buffer[: end + 1]
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip().decode("utf-8")
        if len(buffer) > MAX_EVENT_BYTES:
            raise _StreamError(f"an event is larger than {MAX_EVENT_BYTES >> 20} MiB")
