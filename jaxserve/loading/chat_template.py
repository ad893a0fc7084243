"""From a conversation to the one text a chat model was trained to continue.

The format is a Jinja template that comes with the checkpoint. Everything a client can send ends in
text or in InvalidRequestError: a template that refuses (`raise_exception`) is quoted, and one that
fails is the request's problem too, since another conversation would have passed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.chat_limits import TemplateLimitError
from jaxserve.loading.chat_messages import TemplateHabits, normalize_messages
from jaxserve.loading.chat_sandbox import TemplateRaisedError, compile_template, render
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 1 << 20
_MAX_JSON_BYTES = 1 << 24  # tokenizer_config.json may list thousands of tokens
_OURS = frozenset(("messages", "tools", "add_generation_prompt"))
_NEEDLE = "qzjxneedle"


class ChatTemplate:
    """A compiled template. Immutable; `render` may be called from any thread.

    source: Jinja text. special_tokens: variables such as bos_token. tool_source: the template for
    requests with tools, where a checkpoint has a separate one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._plain = self._compile(source)
        self._with_tools = self._plain if tool_source is None else self._compile(tool_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. InvalidRequestError if the template cannot take the conversation.

        extra: further variables of the template (`chat_template_kwargs`, say enable_thinking).
        """
        if extra and (taken := _OURS & extra.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}; "
                "these are fields of the request",
                "chat_template_kwargs",
            )
        chosen = self._with_tools if tools else self._plain
        variables = self._special_tokens | {"documents": None} | dict(extra or {})
        variables["tools"] = list(tools) if tools else None
        variables["add_generation_prompt"] = add_generation_prompt
        return chosen.render(messages, variables)

    def _compile(self, source: str) -> "_Compiled":
        return _Compiled(source, self._special_tokens)


class _Compiled:
    """One Jinja template and what it was found to accept."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelLoadError(
                f"the chat template has {len(source)} characters, the limit is "
                f"{MAX_SOURCE_CHARACTERS}"
            )
        try:
            self._template = compile_template(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelLoadError(
                f"the chat template does not compile: {type(error).__name__}: "
                f"{str(error)[:200]}; pass a corrected one with --chat-template"
            ) from error
        self._habits = _probe(self._template, source, special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
        variables["messages"] = normalize_messages(messages, self._habits)
        try:
            return render(self._template, variables)
        except TemplateRaisedError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {str(error)[:500]}",
                "messages",
            ) from error
        except Exception as error:  # the template is not our code: anything may come out of it
            raise InvalidRequestError(
                "the model's chat template cannot render this conversation: "
                f"{type(error).__name__}: {str(error)[:300]}",
                "messages",
            ) from error


def _probe(
    template: jinja2.Template, source: str, special_tokens: Mapping[str, str]
) -> TemplateHabits:
    """Find by trial which forms of content and arguments reach the output undamaged.

    Reading the source instead would have to follow variables and macros; a few renderings do not.
    """
    variables = dict(special_tokens) | {"documents": None, "tools": None}

    def output(*messages: dict[str, Any]) -> str:
        given = variables | {"messages": list(messages), "add_generation_prompt": True}
        try:
            return render(template, given)
        except TemplateLimitError as error:
            raise ModelLoadError(f"the chat template cannot render 'hello': {error}") from error
        except Exception:  # it refuses this form, whatever the way
            return ""

    user = {"role": "user", "content": "hello"}

    def with_arguments(arguments: Any) -> str:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        answer = {"role": "tool", "tool_call_id": "call00001", "name": "probe", "content": "ok"}
        return output(user, {"role": "assistant", "content": "", "tool_calls": [call]}, answer)

    plain = output({"role": "user", "content": _NEEDLE})
    parts = output({"role": "user", "content": [{"type": "text", "text": _NEEDLE}]})
    as_mapping = with_arguments({_NEEDLE: "v"})
    as_text = with_arguments(json.dumps({_NEEDLE: "v"}))
    takes_parts = _NEEDLE in parts and "'type'" not in parts and '"type"' not in parts
    takes_mapping = _NEEDLE in as_mapping and f"'{_NEEDLE}'" not in as_mapping
    return TemplateHabits(
        text=_NEEDLE in plain or not takes_parts,
        parts=takes_parts,
        arguments_as_text=not takes_mapping and f'"{_NEEDLE}"' in as_text,
        knows_developer="developer" in source,
    )


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered conversation: the template wrote every special token there shall be."""
    return tokenizer.encode(text, add_special_tokens=False)


def template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in a GGUF file's metadata, or None for a base model."""
    source = metadata.get("tokenizer.chat_template")
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    for key, value in (("", source), (".tool_use", tool_source)):
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(f"tokenizer.chat_template{key} is not a text")
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(tokenizer), tool_source)


def template_from_folder(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a Hugging Face folder, or None for a base model.

    Looked for in chat_template.jinja, then tokenizer_config.json (a text, or named templates of
    which "default" and "tool_use" are used), then chat_template.json.
    """
    special = _special_tokens(tokenizer)
    tool_source = _read_text(path / "additional_chat_templates" / "tool_use.jinja")
    if source := _read_text(path / "chat_template.jinja"):
        return ChatTemplate(source, special, tool_source)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not (path / name).is_file():
            continue
        found = read_json_object(path / name, _MAX_JSON_BYTES).get("chat_template")
        if isinstance(found, str) and found:
            return ChatTemplate(found, special, tool_source)
        if found:
            named = _named_templates(found, path / name)
            return ChatTemplate(named["default"], special, named.get("tool_use"))
    return None


def _named_templates(found: Any, path: Path) -> dict[str, str]:
    """Older checkpoints list {"name": ..., "template": ...}."""
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise ModelLoadError(
            f"{path}: chat_template is neither a text nor a list of named templates"
        ) from error
    if "default" not in named:
        named["default"] = next(iter(named.values()))
    return named


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    tokens = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "unk_token": tokenizer.unk_token,
        "pad_token": tokenizer.pad_token,
    }
    return {name: token for name, token in tokens.items() if token is not None}


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        raw = file.read(4 * MAX_SOURCE_CHARACTERS + 1)
    if len(raw) > 4 * MAX_SOURCE_CHARACTERS:
        raise ModelLoadError(f"{path}: longer than the limit of {MAX_SOURCE_CHARACTERS} characters")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 text") from error
