"""Puts the application together: routes, middlewares, and a runner with the right switches.

app = make_app(client, model, ServerSettings())      ready at once
app = make_loading_app(settings, metrics, name) answers 503 until attach(app, ...)
runner = make_runner(app)
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from jaxserve.engine.client import EngineClient
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.server.body import check_headers
from jaxserve.server.chat import handle_chat
from jaxserve.server.completions import handle_completions
from jaxserve.server.errors import ApiError, error_middleware
from jaxserve.server.info import (
    handle_health,
    handle_metrics,
    handle_model,
    handle_models,
    handle_version,
)
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import STATE, Backend, ServerState

access_logger = logging.getLogger("jaxserve.access")

_CANCEL_GRACE_SECONDS = 2.0
_KEEPALIVE_SECONDS = 75.0  # longer than proxies keep an idle connection, which they then reuse


def make_app(
    client: EngineClient,
    model: LoadedModel,
    settings: ServerSettings,
    metrics: ServerMetrics | None = None,
) -> web.Application:
    """The application around a started client.

    Of `model` only name, tokenizer, chat_template, vocab_size, max_model_len (the engine's, if
    that is shorter) and sampling_defaults are used. `metrics` is the one whose `on_step` observes
    the engine; without it a fresh one counts requests only.
    """
    names = settings.served_model_names or (model.name,)
    app = make_loading_app(settings, metrics or ServerMetrics(names[0]), model.name)
    attach(app, client, model)
    return app


def make_loading_app(
    settings: ServerSettings, metrics: ServerMetrics, model_name: str
) -> web.Application:
    """The application before its model: /health says 503 loading, and so does everything else."""
    app = web.Application(middlewares=[error_middleware, _auth_middleware, _calls_middleware])
    executor = ThreadPoolExecutor(settings.text_workers, thread_name_prefix="jaxserve-text-work")
    app[STATE] = ServerState(
        settings, metrics, settings.served_model_names or (model_name,), executor
    )
    app.cleanup_ctx.append(_executor_context)
    app.router.add_post("/v1/completions", handle_completions, expect_handler=_on_expect)
    app.router.add_post("/v1/chat/completions", handle_chat, expect_handler=_on_expect)
    app.router.add_get("/v1/models", handle_models)
    app.router.add_get("/v1/models/{name:.+}", handle_model)
    app.router.add_get("/health", handle_health)
    app.router.add_get("/metrics", handle_metrics)
    app.router.add_get("/version", handle_version)
    return app


def attach(app: web.Application, client: EngineClient, model: LoadedModel) -> None:
    """Give a loading application its model; from now on it answers."""
    app[STATE].backend = Backend(client, model)


def make_runner(app: web.Application) -> web.AppRunner:
    """The runner every server must use.

    handler_cancellation: without it a handler runs on after its client hung up, and so would the
    generation. auto_decompress off: compressed bodies are refused by their header, and must not be
    inflated while aiohttp skips over them.
    """
    state = app[STATE]
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=access_logger if state.settings.log_requests else None,
        access_log_format='%a "%r" %s %b bytes %Tf s',
        shutdown_timeout=_CANCEL_GRACE_SECONDS,
        keepalive_timeout=_KEEPALIVE_SECONDS,
    )


async def drain(app: web.Application, timeout: float) -> None:
    """Refuse new generations, let the running ones end for `timeout` seconds, abort the rest."""
    state = app[STATE]
    state.draining = True
    if state.calls and timeout > 0:
        await asyncio.wait(list(state.calls), timeout=timeout)
    client = state.backend.client if state.backend else None
    if client is not None:
        await asyncio.get_running_loop().run_in_executor(None, client.shutdown)
    if state.calls:
        await asyncio.wait(list(state.calls), timeout=_CANCEL_GRACE_SECONDS)


@web.middleware
async def _auth_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for the API key on everything under /v1."""
    key = request.app[STATE].settings.api_key
    if key is not None and request.path.startswith("/v1/"):
        scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer" or not _same(given.strip(), key):
            raise ApiError(
                401,
                "wrong or missing API key; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


def _same(given: str, key: str) -> bool:
    """Compare in constant time; digests, so that not even the length shows."""
    digests = (hashlib.sha256(text.encode(errors="replace")).digest() for text in (given, key))
    return hmac.compare_digest(*digests)


@web.middleware
async def _calls_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep track of the generations in flight, for the limit and for draining."""
    if request.method != hdrs.METH_POST:
        return await handler(request)
    calls = request.app[STATE].calls
    task = asyncio.current_task()
    assert task is not None
    calls.add(task)
    try:
        return await handler(request)
    finally:
        calls.discard(task)


async def _on_expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`; a body its headers already doom is not even asked for."""
    try:
        check_headers(request, request.app[STATE].settings)
    except ApiError as error:
        return error.response()
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # as aiohttp's own handler does: the response has not begun
    return None


async def _executor_context(app: web.Application) -> AsyncIterator[None]:
    yield
    app[STATE].executor.shutdown(wait=False, cancel_futures=True)
