"""Typed access to the fields of a JSON body, where null always means "not given"."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.sampling_params import is_int
from jaxserve.server.errors import ApiError

logger = logging.getLogger(__name__)

MAX_SHOWN = 40


def bad_field(name: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=name, code=code)


def show(value: Any) -> str:
    """What a user's value is, in few words: numbers are shown, anything that can be long is not."""
    for kind, name in ((str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return f"{name} of length {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else "a very large number"


def get_bool(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A JSON boolean; 0, 1 and "true" are refused."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_field(name, f"{name} is {show(value)}; give true or false")
    return value


def get_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number in [low, high], or None."""
    value = body.get(name)
    if value is None:
        return None
    if not is_int(value) or not low <= value <= high:
        raise bad_field(name, f"{name} is {show(value)}; give a whole number from {low} to {high}")
    return int(value)


def get_str(body: Mapping[str, Any], name: str) -> str | None:
    """A string, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_field(name, f"{name} must be a string")
    return value


def get_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A JSON object; absent is empty."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} must be an object")
    return value


def check_fields(
    body: Mapping[str, Any],
    known: frozenset[str],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> None:
    """Refuse what would change the answer and is not served; log and ignore the unknown.

    unsupported: per field, the values that change nothing (null never does).
    """
    for name, neutral in unsupported.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise bad_field(name, f"{name} is not supported by this server", "unsupported_value")
    unknown = [name for name in body if name not in known and name not in unsupported]
    if unknown:
        names = ", ".join(repr(name[:MAX_SHOWN]) for name in unknown[:8])
        logger.warning("ignored %d unknown request field(s): %s", len(unknown), names)
