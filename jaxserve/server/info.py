"""The endpoints that describe the server: /health, /metrics, /version, /v1/models."""

from importlib.metadata import version
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from jaxserve.server.errors import ApiError
from jaxserve.server.state import STATE, ServerState


async def handle_health(request: web.Request) -> web.Response:
    """200 when requests are being served; 503 while loading, draining, hung or dead."""
    problem = request.app[STATE].problem()
    if problem is not None:
        return problem.response()
    return web.json_response({"status": "ok"})


async def handle_metrics(request: web.Request) -> web.Response:
    """The Prometheus exposition."""
    body = request.app[STATE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def handle_version(_: web.Request) -> web.Response:
    """The version of jaxserve."""
    return web.json_response({"version": version("jaxserve")})


async def handle_models(request: web.Request) -> web.Response:
    """Every name the model is served under."""
    state = request.app[STATE]
    cards = [_card(state, name) for name in state.model_names]
    return web.json_response({"object": "list", "data": cards})


async def handle_model(request: web.Request) -> web.Response:
    """One name, or 404."""
    state = request.app[STATE]
    name = request.match_info["name"]
    if name not in state.model_names:
        names = ", ".join(state.model_names)
        raise ApiError(
            404,
            f"this server does not have that model; it serves {names}",
            param="model",
            code="model_not_found",
        )
    return web.json_response(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "jaxserve",
        "root": state.backend.model.name if state.backend else None,
        "parent": None,
        "max_model_len": state.backend.model.max_model_len if state.backend else None,
    }
