"""What users of the Python API may give as a prompt, turned into token ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.loading.chat_template import encode_chat
from jaxserve.loading.loaded_model import LoadedModel

# {"prompt": text} or {"prompt_token_ids": ids}, with or without "cache_salt"
Prompt = str | Mapping[str, Any]


@dataclass(frozen=True)
class ReadPrompt:
    """text is None if only ids were given."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def read_prompt(model: LoadedModel, prompt: Prompt) -> ReadPrompt:
    """Raises InvalidRequestError for anything that is no Prompt. The client checks the ids."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"a prompt of type {type(prompt).__name__}; give a text, or token ids as "
            '{"prompt_token_ids": [...]}',
            "prompt",
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or (text is None and ids is None):
        keys = ", ".join(sorted(map(str, prompt)))[:80]
        raise InvalidRequestError(
            f'a prompt with the keys ({keys}); give "prompt" or "prompt_token_ids"', "prompt"
        )
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"the prompt is a {type(text).__name__}, not text", "prompt")
    if ids is not None:
        return ReadPrompt(text, _token_ids(ids), salt)
    assert text is not None
    return ReadPrompt(text, tuple(model.tokenizer.encode(text)), salt)


def read_conversation(model: LoadedModel, messages: Any, options: Mapping[str, Any]) -> ReadPrompt:
    """Messages through the chat template; options are those of ChatTemplate.render."""
    if model.chat_template is None:
        raise InvalidRequestError(
            f"the model {model.name} has no chat template (a base model); use generate",
            "messages",
        )
    require_list("messages", messages)
    text = model.chat_template.render(messages, **options)
    return ReadPrompt(text, tuple(encode_chat(model.tokenizer, text)))


def at_place[T](what: str, index: int, check: Callable[..., T], *args: Any) -> T:
    """check(*args), with the place in the user's list in front of its error."""
    try:
        return check(*args)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{what} {index}: {error}", error.param) from error


def many_prompts(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """The prompts; one alone becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts is a {type(prompts).__name__}, not a list", "prompts")
    return prompts


def require_list(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}, not a list", name)


def _token_ids(ids: Any) -> tuple[int, ...]:
    """The ids as a tuple; arrays become Python numbers."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    require_list("prompt_token_ids", listed)
    return tuple(listed)
