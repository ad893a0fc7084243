"""Every failure becomes one small JSON object in OpenAI's form, whatever raised it.

Clients of the OpenAI libraries parse `{"error": {"message", "type", "param", "code"}}`; aiohttp's
own text/plain pages would surface there as a decoding error instead of a reason.
"""

import json
import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2_000
RETRY_AFTER_SECONDS = "1"

_HTTP_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    411: "length_required",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


class ApiError(Exception):
    """An error with its HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object; the message is cut so that no input can make it long."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        fields = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> web.Response:
        """The whole HTTP response."""
        return web.Response(
            status=self.status,
            body=json.dumps(self.body()).encode(),
            content_type="application/json",
            headers=self.headers,
        )


def unavailable(message: str, code: str) -> ApiError:
    """503: the engine is loading, draining, hung or dead."""
    headers = {"Retry-After": RETRY_AFTER_SECONDS}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def too_busy(message: str) -> ApiError:
    """429: a bounded queue is full."""
    headers = {"Retry-After": RETRY_AFTER_SECONDS}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def generation_failed(message: str | None) -> ApiError:
    """500: the engine gave up on this one request (a row of NaN logits, say)."""
    return ApiError(
        500, message or "the engine failed this request", kind="server_error", code="engine_error"
    )


def timed_out() -> ApiError:
    """408: the request's own `timeout` passed before anything was generated.

    OpenAI's libraries would send it again at once, to a server that is busy as it is.
    """
    return ApiError(
        408,
        "the request's timeout passed before a token was generated; give a longer timeout, or try "
        "again when the server is less busy",
        kind="timeout_error",
        param="timeout",
        code="generation_timeout",
        headers={"x-should-retry": "false"},
    )


def as_api_error(error: Exception) -> ApiError:
    """The ApiError that stands for any exception a handler may raise."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, QueueFullError):
        return too_busy(str(error))
    if isinstance(error, EngineDeadError):
        return unavailable(str(error), "engine_dead")
    if isinstance(error, web.HTTPException):
        return _from_http_exception(error)
    logger.error("a handler failed", exc_info=error)
    return ApiError(500, "internal error; see the server's log", kind="server_error")


def _from_http_exception(error: web.HTTPException) -> ApiError:
    message = error.reason
    headers = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"this path answers {allowed} only"
        headers["Allow"] = allowed
    elif error.status == 404:
        message = "unknown path; see /v1/completions, /v1/chat/completions, /v1/models, /health"
    code = _HTTP_CODES.get(error.status)
    return ApiError(error.status, message, code=code, headers=headers)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into the JSON response."""
    try:
        return await handler(request)
    except Exception as error:
        return as_api_error(error).response()
