"""Reading a request's JSON body with every dimension bounded: bytes, time, values, nesting.

aiohttp would buffer, inflate and decode on the event loop with a 1 MiB limit and a text/plain 413.
Here the size is checked before and while reading, compressed bodies are refused (so a small bomb
stays small) and parsing runs on a worker thread.
"""

import asyncio
import json
from concurrent.futures import Executor
from typing import Any, NoReturn

from aiohttp import hdrs, web

from jaxserve.server.errors import ApiError
from jaxserve.server.settings import MAX_JSON_COST, ServerSettings

# What a byte costs the parser, in items of an array (about 0.2 us): containers and the entries of
# objects two, an escape in a text a little.
_COSTS = {b",": 1.0, b":": 2.0, b"{": 2.0, b"[": 2.0, b"\\": 0.08}


async def read_json_object(
    request: web.Request, settings: ServerSettings, executor: Executor
) -> dict[str, Any]:
    """The body as a dict.

    Raises ApiError: 400 malformed or not an object, 408 too slow, 413 too large, 415 compressed
    or not JSON.
    """
    check_headers(request, settings)
    try:
        async with asyncio.timeout(settings.body_timeout):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {settings.body_timeout:g} s",
            code="request_timeout",
        ) from None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, parse_json_object, body)


def check_headers(request: web.Request, settings: ServerSettings) -> None:
    """Refuse by the headers alone what need not be read: compressed, not JSON, too large."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()
    if encoding != "identity":
        raise ApiError(
            415,
            "compressed bodies are not accepted; send the JSON without Content-Encoding",
            code="unsupported_media_type",
        )
    if request.content_type not in ("application/json", "text/json"):
        raise ApiError(
            415,
            "the body must be JSON; send Content-Type: application/json",
            code="unsupported_media_type",
        )
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)


async def _read(request: web.Request, limit: int) -> bytearray:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than this server's limit of {limit} bytes (--max-body-size)",
        code="request_too_large",
    )


def parse_json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse strict JSON; the counts bound how long the parser holds the GIL, and its memory.

    Raises ApiError 400 or 413. Messages give positions, never the input.
    """
    if sum(body.count(byte) * cost for byte, cost in _COSTS.items()) > MAX_JSON_COST:
        raise ApiError(
            413,
            f"the body holds too many JSON values (the limit is about {MAX_JSON_COST}); "
            "send several requests",
            code="request_too_large",
        )
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _malformed(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _malformed("nested too deeply") from None
    except ValueError:
        raise _malformed("a number is out of range") from None
    if not isinstance(value, dict):
        raise _malformed("the body must be an object")
    return value


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"malformed JSON: {reason}", code="invalid_json")
