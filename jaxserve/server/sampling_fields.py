"""The sampling fields of a JSON body, shared by both endpoints, as SamplingParams."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.fields import bad_field, get_bool, get_int, get_object, show
from jaxserve.speculative_config import parse_request_override

_NUMBERS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "prompt_logprobs",
)
_PLAIN = (*_NUMBERS, "logit_bias", "stop", "stop_token_ids")
_FLAGS = {
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

COMMON_FIELDS = frozenset(
    (
        *_PLAIN,
        *_FLAGS,
        "model",
        "max_tokens",
        "logprobs",
        "stream",
        "stream_options",
        "priority",
        "timeout",
        "cache_salt",
        "speculative",
        "return_token_ids",
        "add_special_tokens",
        # Known, and rightly without effect on the answer:
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    )
)

# Fields that would change the answer and are not served; with the values that are neutral.
COMMON_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
}


def parse_sampling(
    body: Mapping[str, Any],
    model_defaults: Mapping[str, float | int],
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """SamplingParams of the body; what it leaves out comes from the model's generation_config.

    max_tokens None stands until the prompt's length is known. Raises InvalidRequestError or
    ApiError naming the field.
    """
    values: dict[str, Any] = {
        name: model_defaults[name] for name in _MODEL_DEFAULTS if name in model_defaults
    }
    for name in _NUMBERS:
        if isinstance(body.get(name), str | list | dict):
            raise bad_field(name, f"{name} is {show(body[name])}; give a number")
    values.update((name, body[name]) for name in _PLAIN if body.get(name) is not None)
    values.update((name, get_bool(body, name, default)) for name, default in _FLAGS.items())
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        num_speculative_tokens=parse_request_override(body.get("speculative")),
    )


def parse_max_tokens(body: Mapping[str, Any], *names: str, least: int = 1) -> int | None:
    """The first of `names` that the body gives."""
    for name in names:
        value = get_int(body, name, least, 1 << 31)
        if value is not None:
            return value
    return None


def parse_stream_options(body: Mapping[str, Any], stream: bool) -> bool:
    """Whether usage was asked for in the stream; options without a stream are an error."""
    options = get_object(body, "stream_options")
    if body.get("stream_options") is not None and not stream:
        raise bad_field("stream_options", "stream_options needs stream: true")
    return get_bool(options, "include_usage")


def rename_param(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error under the field's name as the user typed it."""
    name = names.get(error.param or "")
    if name is None:
        return error
    return InvalidRequestError(str(error).replace(error.param or "", name), name)
