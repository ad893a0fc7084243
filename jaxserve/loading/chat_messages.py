"""Conversations as clients send them, brought into the shape a chat template expects.

OpenAI's API allows more than templates written for one trainer's data can take: no content beside
tool calls, content as a list of parts, arguments as JSON text. What a template can take is probed
once (`chat_template`) and given here as `TemplateHabits`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class TemplateHabits:
    """text, parts: the forms of content that arrive in the output. arguments_as_text: tool call
    arguments are pasted, not serialised. knows_developer: the source speaks of that role."""

    text: bool = True
    parts: bool = False
    arguments_as_text: bool = False
    knows_developer: bool = False


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], habits: TemplateHabits
) -> list[dict[str, Any]]:
    """Messages ready for a template; InvalidRequestError names the message and field at fault.

    Missing or null content becomes "". Text parts stay parts if the template reads them, else
    they are joined with a newline, as vLLM does. Arguments become a mapping, or text for a
    template that pastes them. An empty `tool_calls` is left out. The developer role is the system
    role to a template that never heard of it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message", "messages")
    return [_normalize(message, index, habits) for index, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], index: int, habits: TemplateHabits) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a text such as 'user'", f"{where}.role")
    if role == "developer" and not habits.knows_developer:
        role = "system"
    result = dict(message) | {"role": role}
    result["content"] = _content(message.get("content"), f"{where}.content", habits)
    tool_calls = result.pop("tool_calls", None)
    if tool_calls:
        result["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls", habits)
    return result


def _content(content: Any, where: str, habits: TemplateHabits) -> str | list[dict[str, str]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return content if habits.text else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"{where} must be a text, a list of parts or null, not {type(content).__name__}", where
        )
    texts = [_part_text(part, f"{where}[{number}]") for number, part in enumerate(content)]
    if habits.parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(
            f"{where} must be an object such as {{'type': 'text', ...}}", where
        )
    kind = part.get("type", "text")
    if kind not in _TEXT_KEYS:
        raise InvalidRequestError(
            f"{where} is of type {str(kind)[:40]!r}; this model reads parts of type 'text' only",
            where,
        )
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{_TEXT_KEYS[kind]} must be a text", where)
    return text


def _tool_calls(tool_calls: Any, where: str, habits: TemplateHabits) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, str):
        raise InvalidRequestError(f"{where} must be a list", where)
    return [_tool_call(call, f"{where}[{index}]", habits) for index, call in enumerate(tool_calls)]


def _tool_call(call: Any, where: str, habits: TemplateHabits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{where} must be an object with function.name and function.arguments", where
        )
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments", habits)
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _arguments(arguments: Any, where: str, habits: TemplateHabits) -> Any:
    if arguments is None or arguments == "":
        arguments = {}
    if habits.arguments_as_text:
        if isinstance(arguments, str):
            return arguments
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{where} is not valid JSON ({str(error)[:80]})", where
            ) from error
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{where} must be a JSON object", where)
    return arguments
