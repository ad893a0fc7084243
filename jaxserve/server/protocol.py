"""From a JSON body to a checked request: what /v1/completions and /v1/chat/completions accept.

Everything that needs no tokenizer is checked here; `prompts.py` checks what does. Fields that are
known and change the answer but are not served are a 400, never ignored; unknown ones are ignored
with a line in the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.outputs import check_cache_salt, check_timeout
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.server.errors import ApiError
from jaxserve.server.fields import (
    bad_field,
    check_fields,
    get_bool,
    get_int,
    get_object,
    get_str,
    show,
)
from jaxserve.server.sampling_fields import (
    COMMON_FIELDS,
    COMMON_UNSUPPORTED,
    parse_max_tokens,
    parse_sampling,
    parse_stream_options,
    rename_param,
)
from jaxserve.server.settings import MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS

COMPLETION_MAX_TOKENS = 16  # OpenAI's default, shortened where the context ends earlier
MAX_PRIORITY = 1 << 31

Prompt = str | list[Any]  # text, or token ids still to be checked


@dataclass(frozen=True)
class CallOptions:
    """What both endpoints share. params.max_tokens None: not given, resolved with the prompt."""

    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int
    timeout: float | None
    cache_salt: str


@dataclass(frozen=True)
class CompletionCall:
    """A body of /v1/completions.

    echo_logprobs: alternatives that the echoed tokens come with; None: without logprobs.
    prompt_logprobs: those of the field of that name. params has the larger of both.
    prompt_only: max_tokens is 0; it runs as 1, because only then the prompt is run.
    """

    options: CallOptions
    prompts: tuple[Prompt, ...]
    echo: bool
    echo_logprobs: int | None
    prompt_logprobs: int | None
    prompt_only: bool
    add_special_tokens: bool


@dataclass(frozen=True)
class ChatCall:
    """A body of /v1/chat/completions; `tools` is None when the template shall not see any."""

    options: CallOptions
    messages: list[Any]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    add_special_tokens: bool
    template_kwargs: dict[str, Any]


COMPLETION_FIELDS = COMMON_FIELDS | {"prompt", "echo", "best_of"}
COMPLETION_UNSUPPORTED = COMMON_UNSUPPORTED | {"suffix": ("",)}

CHAT_FIELDS = COMMON_FIELDS | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "chat_template_kwargs",
}
CHAT_UNSUPPORTED = COMMON_UNSUPPORTED | {
    "suffix": ("",),
    "best_of": (1,),
    "echo": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "reasoning_effort": (),
}


def check_model(body: Mapping[str, Any], served: tuple[str, ...]) -> None:
    """Refuse a model this server does not have; an absent one means the one it has."""
    name = get_str(body, "model")
    if name is not None and name not in served:
        raise ApiError(
            404,
            f"this server does not have that model; it serves {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def parse_completion(
    body: Mapping[str, Any], model_defaults: Mapping[str, float | int]
) -> CompletionCall:
    """Check a /v1/completions body. Raises ApiError or InvalidRequestError naming the field."""
    check_fields(body, COMPLETION_FIELDS, COMPLETION_UNSUPPORTED)
    echo = get_bool(body, "echo")
    max_tokens = parse_max_tokens(body, "max_tokens", least=0 if echo else 1)
    prompt_only = max_tokens == 0
    params = parse_sampling(
        body,
        model_defaults,
        max_tokens=1 if prompt_only else max_tokens,
        logprobs=get_int(body, "logprobs", 0, MAX_LOGPROBS),
    )
    best_of = get_int(body, "best_of", 1, 1 << 31)
    if best_of is not None and best_of != params.n:
        raise bad_field("best_of", "best_of is not supported; leave it out or set it to n")
    prompt_logprobs = params.prompt_logprobs
    echo_logprobs = params.logprobs if echo else None
    if echo_logprobs is not None:
        params = replace(params, prompt_logprobs=max(echo_logprobs, prompt_logprobs or 0))
    return CompletionCall(
        options=_parse_options(body, params),
        prompts=_parse_prompts(body.get("prompt")),
        echo=echo,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_only=prompt_only,
        add_special_tokens=get_bool(body, "add_special_tokens", True),
    )


def parse_chat(body: Mapping[str, Any], model_defaults: Mapping[str, float | int]) -> ChatCall:
    """Check a /v1/chat/completions body. Raises ApiError or InvalidRequestError."""
    check_fields(body, CHAT_FIELDS, CHAT_UNSUPPORTED)
    limits = ("max_completion_tokens", "max_tokens")
    renames = {"logprobs": "top_logprobs"}
    if body.get("max_completion_tokens") is not None:
        renames["max_tokens"] = "max_completion_tokens"
    try:
        params = parse_sampling(
            body,
            model_defaults,
            max_tokens=parse_max_tokens(body, *limits),
            logprobs=_parse_chat_logprobs(body),
        )
    except InvalidRequestError as error:
        raise rename_param(error, renames) from None
    return ChatCall(
        options=_parse_options(body, params),
        messages=_parse_messages(body.get("messages")),
        tools=_parse_tools(body),
        add_generation_prompt=get_bool(body, "add_generation_prompt", True),
        add_special_tokens=get_bool(body, "add_special_tokens", False),
        template_kwargs=get_object(body, "chat_template_kwargs"),
    )


def _parse_options(body: Mapping[str, Any], params: SamplingParams) -> CallOptions:
    stream = get_bool(body, "stream")
    return CallOptions(
        params=params,
        stream=stream,
        include_usage=parse_stream_options(body, stream),
        return_token_ids=get_bool(body, "return_token_ids"),
        priority=get_int(body, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        timeout=_parse_timeout(body),
        cache_salt=_parse_cache_salt(body),
    )


def _parse_timeout(body: Mapping[str, Any]) -> float | None:
    timeout = body.get("timeout")
    check_timeout(timeout)
    return None if timeout is None else float(timeout)


def _parse_cache_salt(body: Mapping[str, Any]) -> str:
    """The salt, or "" for none. A user who sends an empty one would believe to be apart."""
    salt = get_str(body, "cache_salt")
    if salt == "":
        raise bad_field("cache_salt", "cache_salt is empty; give a text, or leave it out")
    check_cache_salt(salt or "")
    return salt or ""


def _parse_prompts(prompt: Any) -> tuple[Prompt, ...]:
    """One prompt or many: text, token ids, a list of texts, or a list of lists of ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise bad_field(
            "prompt", "prompt must be a string, a list of strings, token ids or lists of token ids"
        )
    if all(isinstance(item, str) for item in prompt) or all(
        isinstance(item, list) for item in prompt
    ):
        if len(prompt) > MAX_PROMPTS:
            raise bad_field("prompt", f"prompt holds {len(prompt)} prompts, above {MAX_PROMPTS}")
        return tuple(prompt)
    return (prompt,)


def _parse_chat_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = get_bool(body, "logprobs")
    top = get_int(body, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    return (top or 0) if wanted else None


def _parse_messages(messages: Any) -> list[Any]:
    """The list as it is; the template's side checks each message, since it knows their forms."""
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "messages must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"messages holds {len(messages)}, above {MAX_MESSAGES}")
    return messages


def _parse_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools for the template; "none" hides them, and nothing can force a call."""
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise bad_field(
            "tool_choice",
            f"tool_choice {show(choice)} is not supported; choose none or auto",
            "unsupported_value",
        )
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"tools must be a list of at most {MAX_TOOLS} tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad_field("tools", f'tools[{index}] must be an object of type "function"')
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field("tools", f"tools[{index}].function.name must be a string")
    return tools if tools and choice != "none" else None
