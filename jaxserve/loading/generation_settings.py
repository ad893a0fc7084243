"""What a checkpoint says about generating: which ids end an answer, and how to sample."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.chat_template import ChatTemplate
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.tokenizer import Tokenizer
from jaxserve.sampling_params import SamplingParams

MAX_EOS_IDS = 16

# Ends of a turn in the chat formats of today. Older GGUF files name <eos> alone, so a chat model
# would talk on past its turn; one of these that its template writes ends an answer as well.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>")

# Of generation_config.json, and of GGUF's general.sampling.*, under SamplingParams' names.
_HF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def gguf_eos_ids(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[int, ...]:
    """End of text, of turn and of message, as far as the file names them, without repeats."""
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    if template is not None:
        ids += [tokenizer.token_to_id(text) for text in _TURN_ENDS if text in template.source]
    return _checked_ids(ids, tokenizer, "tokenizer.ggml.eos_token_id")


def folder_eos_ids(
    config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """generation_config.json's list; without one config.json's; and the tokenizer's own EOS."""
    ids: list[Any] = []
    for settings in (_generation_config(folder), config):
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if any(token_id is not None for token_id in ids):
            break
    return _checked_ids([*ids, tokenizer.eos_token_id], tokenizer, f"{folder}: eos_token_id")


def gguf_sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, float | int]:
    """Sampling parameters that newer GGUF files recommend, under SamplingParams' names."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()}
    return _checked_defaults(found, "metadata general.sampling.*")


def folder_sampling_defaults(folder: Path) -> dict[str, float | int]:
    """Sampling parameters of generation_config.json; empty without the file."""
    settings = _generation_config(folder)
    found = {name: settings.get(name) for name in _HF_SAMPLING}
    return _checked_defaults(found, str(folder / "generation_config.json"))


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}


def _checked_ids(ids: Iterable[Any], tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    distinct = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    for token_id in distinct:
        if type(token_id) is not int or not 0 <= token_id < tokenizer.vocab_size:
            raise ModelLoadError(
                f"{where} is {str(token_id)[:40]}; want an id below {tokenizer.vocab_size}"
            )
    if len(distinct) > MAX_EOS_IDS:
        raise ModelLoadError(f"{where} names {len(distinct)} ids, the limit is {MAX_EOS_IDS}")
    return tuple(distinct)


def _checked_defaults(found: Mapping[str, Any], where: str) -> dict[str, float | int]:
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{where}: {error}") from error
    return defaults
