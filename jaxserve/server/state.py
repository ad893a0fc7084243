"""What the handlers of one application share."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from aiohttp import web

from jaxserve.engine.client import EngineClient
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.server.errors import ApiError, too_busy, unavailable
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.settings import ServerSettings


@dataclass(frozen=True)
class Backend:
    """A loaded model and the client of the engine that runs it."""

    client: EngineClient
    model: LoadedModel


@dataclass(eq=False)
class ServerState:
    """The only thing of the server that changes: the backend arrives once it is loaded.

    draining: no new generation is taken; those in `calls` go on.
    """

    settings: ServerSettings
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    executor: ThreadPoolExecutor
    backend: Backend | None = None
    failure: str | None = None  # why loading failed
    draining: bool = False
    calls: set[asyncio.Task[object]] = field(default_factory=set)
    started_at: int = field(default_factory=lambda: int(time.time()))

    def problem(self) -> ApiError | None:
        """Why no answer can be given now, as a 503; None when all is well."""
        if self.draining:
            return unavailable("the server is shutting down", "shutting_down")
        if self.failure is not None:
            return unavailable(f"the model could not be loaded: {self.failure}", "load_failed")
        if self.backend is None or not self.backend.client.is_ready:
            return self._not_ready()
        if not self.backend.client.is_healthy(self.settings.stall_timeout):
            limit = self.settings.stall_timeout
            return unavailable(f"the engine has made no progress for {limit:g} s", "engine_hung")
        return None

    def _not_ready(self) -> ApiError:
        if self.backend is None:
            return unavailable("the model is still loading; try again soon", "loading")
        return unavailable("the engine has stopped", "engine_dead")

    def require_backend(self) -> Backend:
        """The backend for a new generation. Raises ApiError 503, or 429 above the call limit."""
        problem = self.problem()
        if problem is not None:
            raise problem
        limit = self.settings.max_concurrent_requests
        if len(self.calls) > limit:
            self.metrics.rejections.inc()
            raise too_busy(f"{limit} requests are in flight; try again later")
        assert self.backend is not None
        return self.backend

    async def in_thread[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run text work on a worker thread, so that the event loop keeps answering."""
        return await asyncio.get_running_loop().run_in_executor(
            self.executor, functools.partial(call, *args, **kwargs)
        )


STATE: web.AppKey[ServerState] = web.AppKey("jaxserve_state", ServerState)
