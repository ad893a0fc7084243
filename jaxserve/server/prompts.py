"""From a checked call to engine requests: tokenising, templates, lengths. Runs on worker threads.

Nothing is cut silently. A prompt that cannot fit is refused before it costs much: tokenising is
linear in time and takes some hundred bytes a token, so clearly too long texts are measured on a
prefix only.
"""

from dataclasses import dataclass, replace

from jaxserve.engine.outputs import GenerationRequest
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams, is_int
from jaxserve.server.errors import ApiError
from jaxserve.server.fields import bad_field, show
from jaxserve.server.prompt_echo import PromptEcho, token_offsets
from jaxserve.server.protocol import (
    COMPLETION_MAX_TOKENS,
    CallOptions,
    ChatCall,
    CompletionCall,
    Prompt,
)
from jaxserve.server.settings import MAX_CHOICES, MAX_LOGPROB_ENTRIES

# Texts longer than this many characters per token of context are first tried on a prefix, and
# above the second figure refused unread: no vocabulary has tokens that long on average.
PREFIX_CHARS_PER_TOKEN = 16
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True)
class PreparedCall:
    """requests[i] draws params.n choices from prompt i; echoes[i] is what they repeat of it."""

    requests: tuple[GenerationRequest, ...]
    echoes: tuple[PromptEcho, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)


def prepare_completion(call: CompletionCall, model: LoadedModel, call_id: str) -> PreparedCall:
    """Token ids for every prompt of a completions call.

    Raises ApiError or InvalidRequestError naming the field, the values and the limits.
    """
    num_choices = len(call.prompts) * call.options.params.n
    if num_choices > MAX_CHOICES:
        raise bad_field(
            "n", f"prompts x n is {num_choices}, above {MAX_CHOICES}; send several requests"
        )
    requests, echoes = [], []
    for index, prompt in enumerate(call.prompts):
        ids = _completion_ids(prompt, call.add_special_tokens, model)
        params = _with_max_tokens(
            call.options.params, len(ids), model, COMPLETION_MAX_TOKENS, "prompt"
        )
        requests.append(_request(f"{call_id}-{index}", ids, params, call.options, num_choices))
        echoes.append(_echo(call, prompt, ids, model))
    return PreparedCall(tuple(requests), tuple(echoes))


def _echo(
    call: CompletionCall, prompt: Prompt, ids: tuple[int, ...], model: LoadedModel
) -> PromptEcho:
    text = ""
    if call.echo:
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids)
    offsets = None
    if call.echo_logprobs is not None:
        offsets = token_offsets(model.tokenizer, ids, text)
    return PromptEcho(
        text,
        ids if call.options.return_token_ids else None,
        text_offsets=offsets,
        echo_logprobs=call.echo_logprobs or 0,
        first_token=model.tokenizer.id_to_token(ids[0]),
        prompt_logprobs=call.prompt_logprobs,
    )


def prepare_chat(call: ChatCall, model: LoadedModel, call_id: str) -> PreparedCall:
    """Render the template, then tokenise it without adding special tokens of our own.

    The template writes BOS itself where the model wants one; adding another would be the classic
    double BOS. Raises ApiError or InvalidRequestError.
    """
    if model.chat_template is None:
        raise ApiError(
            400,
            "this model has no chat template (it is a base model); use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    text = model.chat_template.render(
        call.messages,
        tools=call.tools,
        add_generation_prompt=call.add_generation_prompt,
        extra=call.template_kwargs,
    )
    ids = _encode(text, call.add_special_tokens, model, "messages")
    params = _with_max_tokens(call.options.params, len(ids), model, None, "messages")
    request = _request(f"{call_id}-0", ids, params, call.options, params.n)
    echo = PromptEcho(
        token_ids=ids if call.options.return_token_ids else None,
        prompt_logprobs=params.prompt_logprobs,
    )
    return PreparedCall((request,), (echo,))


def _request(
    request_id: str,
    ids: tuple[int, ...],
    params: SamplingParams,
    options: CallOptions,
    num_choices: int,
) -> GenerationRequest:
    entries = 0
    if params.logprobs is not None:
        entries += num_choices * (params.max_tokens or 0) * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        entries += num_choices * len(ids) * (params.prompt_logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise bad_field(
            "prompt_logprobs" if params.logprobs is None else "logprobs",
            f"choices x (max_tokens x (logprobs + 1) + prompt tokens x (prompt_logprobs + 1)) is "
            f"{entries}, above {MAX_LOGPROB_ENTRIES}; ask for fewer choices, tokens or logprobs",
        )
    return GenerationRequest(
        request_id, ids, params, options.priority, options.timeout, options.cache_salt
    )


def _completion_ids(prompt: Prompt, add_special: bool, model: LoadedModel) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encode(prompt, add_special, model, "prompt")
    if not prompt:
        raise bad_field("prompt", "the prompt holds no token; give at least one")
    if len(prompt) >= model.max_model_len:
        raise _too_long(f"{len(prompt)} tokens", model, "prompt")
    for token in prompt:
        if not is_int(token) or not 0 <= token < model.vocab_size:
            raise bad_field(
                "prompt",
                f"the prompt holds {show(token)}, which is no token id: the model's vocabulary "
                f"has {model.vocab_size} ids, whole numbers from 0 to {model.vocab_size - 1}",
            )
    return tuple(prompt)


def _encode(text: str, add_special: bool, model: LoadedModel, param: str) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_field(
            param, f"the text holds half a surrogate pair at character {error.start}"
        ) from None
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        raise _too_long(f"{len(text)} characters", model, param)
    prefix = text[: PREFIX_CHARS_PER_TOKEN * model.max_model_len]
    ids = model.tokenizer.encode(prefix, add_special_tokens=add_special)
    if len(prefix) < len(text):
        if len(ids) > 2 * model.max_model_len:  # the cut can change a few tokens at its edge only
            raise _too_long(f"more than {len(ids) - 1} tokens", model, param)
        ids = model.tokenizer.encode(text, add_special_tokens=add_special)
    if not ids:
        raise bad_field(param, "the prompt is empty and this tokenizer adds no token; give a text")
    if len(ids) >= model.max_model_len:
        raise _too_long(f"{len(ids)} tokens", model, param)
    return tuple(ids)


def _with_max_tokens(
    params: SamplingParams, num_prompt: int, model: LoadedModel, default: int | None, param: str
) -> SamplingParams:
    """max_tokens resolved: what was asked for if it fits, else the default or all that is left."""
    room = model.max_model_len - num_prompt
    if params.max_tokens is None:
        return replace(params, max_tokens=room if default is None else min(default, room))
    if params.max_tokens > room:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, together "
            f"{num_prompt + params.max_tokens}; the model's context is {model.max_model_len} "
            f"tokens. Shorten the prompt or ask for at most {room}",
            param=param,
            code="context_length_exceeded",
        )
    return params


def _too_long(size: str, model: LoadedModel, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {size}; the model's context is {model.max_model_len} tokens and must hold "
        "the prompt and at least one token of output. Shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )
