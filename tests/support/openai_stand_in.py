"""A scripted OpenAI-compatible server: streams whose chunks come at known times."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """events: (seconds after the previous one, JSON body or None = break the connection).

    Every request gets the script of its turn; the last one repeats. `done` ends with [DONE].
    """

    turns: list[list[tuple[float, dict[str, Any] | None]]]
    status: int = 200
    done: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)  # per request: when each event went out
    running: int = 0
    most_running: int = 0


def text(content: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of /v1/completions."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of /v1/chat/completions."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    """The closing usage chunk."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"choices": [], "usage": counts}


@asynccontextmanager
async def serve_script(script: Script) -> AsyncIterator[str]:
    """Runs the server on loopback; yields its base URL."""

    async def complete(request: web.Request) -> web.StreamResponse:
        turn = script.turns[min(len(script.bodies), len(script.turns) - 1)]
        sent: list[float] = []
        script.bodies.append(await request.json())
        script.sent.append(sent)
        script.headers.append(dict(request.headers))
        if script.status != 200:
            return web.json_response({"error": {"message": "no such thing"}}, status=script.status)
        script.running += 1
        script.most_running = max(script.most_running, script.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delay, event in turn:
            await asyncio.sleep(delay)
            if event is None:
                assert request.transport is not None
                request.transport.abort()
                break
            sent.append(time.perf_counter())
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        else:
            if script.done:
                await response.write(b"data: [DONE]\n\n")
        script.running -= 1
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
