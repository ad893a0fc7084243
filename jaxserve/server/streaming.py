"""Server-sent events: one JSON object per event, bounded memory, errors inside the stream.

`write` waits when the client does not read (aiohttp drains above 64 KiB), so nothing piles up
here; what piles up in front of it is limited by Generation. A client that reads nothing for
`write_timeout` is cut off.
"""

import asyncio
import json
from typing import Any, Self

from aiohttp import web

from jaxserve.server.errors import ApiError


class EventStream:
    """The response of one stream. Raises ConnectionError once the client is gone or stuck."""

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        self._request = request
        self._write_timeout = write_timeout
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx must not collect the events
            }
        )

    async def open(self) -> Self:
        """Send the headers."""
        await self.response.prepare(self._request)
        return self

    async def send(self, payload: dict[str, Any]) -> None:
        """Send one event."""
        await self.send_text(encode_json(payload).encode())

    async def send_text(self, payload: bytes) -> None:
        """Send one event that is JSON already."""
        await self._write(b"data: %b\n\n" % payload)

    async def done(self) -> None:
        """Say that the answer is complete, and end the response."""
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def fail(self, error: ApiError) -> None:
        """Send the error as the last event; without [DONE] nobody takes the answer for whole."""
        await self.send(error.body())
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await self.response.write(data)
        except TimeoutError:
            cut(self._request)
            raise ConnectionResetError("the client does not read its stream") from None


def cut(request: web.Request) -> None:
    """Drop the connection without waiting for unsent bytes."""
    if request.transport is not None:
        request.transport.abort()


def encode_json(value: Any) -> str:
    """Strict JSON: NaN and infinities are a ValueError, never a token no parser accepts."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
