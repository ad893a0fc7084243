"""The real HTTP server on a loopback port around a fake or a real engine, with the closing asserts.

Every case ends with the same three: the next normal request gives the same answer as before, the
engine holds no request, and no 5xx was sent unless the case wants one.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from jaxserve.engine.client import EngineClient
from jaxserve.server.app import make_app, make_runner
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.settings import ServerSettings

PROBE = {"prompt": "probe", "max_tokens": 3, "temperature": 0}


class RunningServer:
    """A served application and an HTTP session towards it."""

    def __init__(self, app: web.Application, runner: web.AppRunner, client: Any) -> None:
        self.app = app
        self.runner = runner
        self.client = client
        self.statuses: list[int] = []
        self.allowed_statuses: set[int] = set()  # 5xx that the case wants
        self.port = 0
        self.url = ""
        self.session: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await _content(response)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST; `body` goes out as JSON unless `data` is given."""
        if "data" not in options:
            options["json"] = body
        async with self.session.post(self.url + path, **options) as response:
            return response.status, await _content(response)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """A plain completion that must succeed."""
        status, answer = await self.post("/v1/completions", fields)
        assert status == 200, answer
        return answer

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """A plain chat completion that must succeed."""
        status, answer = await self.post("/v1/chat/completions", fields)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, parsed; the last is "[DONE]" if it ended well."""
        body = body | {"stream": True}
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, summed over the label values that are not given."""
        _, text = await self.get("/metrics")
        return read_metric(text, name, **labels)

    async def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait for something to come true while the server goes on."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert condition()

    async def wait_inflight(self, count: int) -> None:
        """Wait until the client holds so many choices."""
        await self.wait_until(lambda: self.client.num_inflight == count)

    async def wait_idle(self, seconds: float = 2.0) -> None:
        """Wait until no choice is open and every page is free."""
        await self.wait_until(lambda: self._num_open() == 0, seconds)

    def _num_open(self) -> int:
        """Requests in the client and in a fake engine, pages in use in a real one."""
        engine = self.client._engine
        held = engine.kv_manager.num_used if hasattr(engine, "kv_manager") else engine.num_open
        return self.client.num_inflight + held


@asynccontextmanager
async def serve(
    engine: Any,
    model: Any,
    settings: ServerSettings | None = None,
    *,
    check_alive: bool = True,
    max_inflight: int = 1024,
) -> AsyncIterator[RunningServer]:
    """Serve `engine` until the block ends, then make the closing asserts."""
    metrics = ServerMetrics(model.name)
    if hasattr(engine, "observe"):
        engine.observe(metrics.on_step)
    else:
        engine.on_step = metrics.on_step
    client = EngineClient(
        engine,
        model.tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_inflight=max_inflight,
    )
    client.start()
    await asyncio.get_running_loop().run_in_executor(None, client.wait_ready, 300)
    app = make_app(client, model, settings or ServerSettings(), metrics)
    async with serve_app(app, client) as server:
        before = await server.complete(**PROBE) if check_alive else None
        yield server
        if check_alive:
            await server.wait_idle()
            after = await server.complete(**PROBE)
            assert before is not None
            assert after["choices"] == before["choices"]
            await server.wait_idle()
    bad = [status for status in server.statuses if status >= 500]
    assert set(bad) <= server.allowed_statuses, bad


@asynccontextmanager
async def serve_app(app: web.Application, client: Any) -> AsyncIterator[RunningServer]:
    """The application on a loopback port, through the runner that production uses."""
    runner = make_runner(app)
    server = RunningServer(app, runner, client)

    async def note_status(_: web.Request, response: web.StreamResponse) -> None:
        server.statuses.append(response.status)

    app.on_response_prepare.append(note_status)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{server.port}"
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as server.session:
            yield server
    finally:
        await runner.cleanup()
        if client is not None:
            await asyncio.get_running_loop().run_in_executor(None, client.shutdown)


def parse_events(data: bytes) -> list[Any]:
    """The payloads of a stream of server-sent events, which must be well formed."""
    text = data.decode()
    assert text.endswith("\n\n")
    events: list[Any] = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: "), event[:80]
        assert "\n" not in event
        payload = event.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else strict_json(payload))
    return events


def strict_json(text: str | bytes) -> Any:
    """Parse JSON as the standard has it: NaN and Infinity are an error."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_metric(text: str, name: str, **labels: str) -> float:
    """The sum of the samples called `jaxserve:<name>` whose labels include `labels`."""
    found = []
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] != f"jaxserve:{name}":
            continue
        if all(f'{key}="{wanted}"' in series for key, wanted in labels.items()):
            found.append(float(value))
    assert found, f"no series jaxserve:{name} with {labels}"
    return sum(found)


async def _content(response: aiohttp.ClientResponse) -> Any:
    body = await response.read()
    if response.content_type == "application/json":
        return strict_json(body)
    return body.decode()
