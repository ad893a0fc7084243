"""A server's life: the port opens, the model loads behind it, requests run, a signal ends it.

The port answers 503 while the model loads, so that probes and clients see "loading" and not a
refused connection. The first SIGTERM or SIGINT drains, the second stops at once.
"""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from jaxserve.server.app import attach, drain, make_runner
from jaxserve.server.state import STATE, Backend


class CannotListenError(Exception):
    """The port could not be opened; the message says why."""


class StillLoadingError(Exception):
    """The server was told to stop while its model was loading; that thread cannot be stopped."""


async def run_server(
    app: web.Application,
    host: str,
    port: int,
    load: Callable[[], Backend],
    *,
    shutdown_timeout: float,
    on_listening: Callable[[str], None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. Both callbacks get the server's URL.

    load runs on a thread of its own and returns the started backend. Raises what it raises,
    CannotListenError, StillLoadingError.
    """
    runner = make_runner(app)
    await runner.setup()
    stop, hurry = asyncio.Event(), asyncio.Event()
    try:
        await _listen(runner, host, port)
        _on_signals(stop, hurry)
        url = _url(runner)
        on_listening(url)
        await _load_or_stop(app, load, stop)
        on_ready(url)
        await stop.wait()
        await _drain_or_hurry(app, shutdown_timeout, hurry)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotListenError(f"cannot listen on {host} port {port}: {reason}") from None


async def _load_or_stop(
    app: web.Application, load: Callable[[], Backend], stop: asyncio.Event
) -> None:
    loaded = _in_daemon_thread(load)
    stopped = asyncio.create_task(stop.wait())
    waiting: list[asyncio.Future[Any]] = [loaded, stopped]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not loaded.done():
        raise StillLoadingError
    try:
        backend = loaded.result()
    except Exception as error:
        app[STATE].failure = str(error)
        raise
    attach(app, backend.client, backend.model)


def _in_daemon_thread(load: Callable[[], Backend]) -> asyncio.Future[Backend]:
    """The result of `load`; unlike an executor's threads this one never delays the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Backend] = loop.create_future()

    def settle(backend: Backend | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif backend is not None:
            future.set_result(backend)

    def run() -> None:
        try:
            outcome: tuple[Backend | None, BaseException | None] = (load(), None)
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="jaxserve-load", daemon=True).start()
    return future


async def _drain_or_hurry(app: web.Application, timeout: float, hurry: asyncio.Event) -> None:
    draining = asyncio.create_task(drain(app, timeout))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()
        await drain(app, 0)


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
