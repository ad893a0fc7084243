"""The tokenizer of a Hugging Face folder: tokenizer.json, or SentencePiece's tokenizer.model.

tokenizer.json is the `tokenizers` library's own format and says everything but the roles of tokens;
those, and whether BOS and EOS go around a text, are in tokenizer_config.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxserve.errors import ModelLoadError
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.sentencepiece_backend import sentencepiece_backend
from jaxserve.loading.sentencepiece_model import read_sentencepiece_model
from jaxserve.loading.tokenizer import Tokenizer

MAX_JSON_BYTES = 1 << 24  # Gemma's configuration lists 6,400 tokens in 1.1 MB
_ROLES = ("bos", "eos", "unk", "pad")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """Build the tokenizer; ModelLoadError names the file that is missing or damaged."""
    config = _optional_json(path / "tokenizer_config.json")
    if (path / "tokenizer.json").is_file():
        backend = _read_backend(path / "tokenizer.json")
        named: dict[str, int] = {}
        prefix, suffix = _template_ids(backend)
    elif (path / "tokenizer.model").is_file():
        model = read_sentencepiece_model(path / "tokenizer.model")
        backend = sentencepiece_backend(model.vocabulary)
        _add_configured_tokens(backend, config, path)
        named = model.named
        prefix, suffix = [named["bos"]] if "bos" in named else [], []
    else:
        raise ModelLoadError(
            f"{path} has neither tokenizer.json nor tokenizer.model; copy one from the original "
            "checkpoint"
        )
    named = named | _named_ids(backend, config, _optional_json(path / "special_tokens_map.json"))
    return Tokenizer(
        backend,
        named=named,
        prefix_ids=_affix(config, named, "bos", prefix),
        suffix_ids=_affix(config, named, "eos", suffix),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ModelLoadError(f"{path} is damaged or too new: {str(error)[:200]}") from error
    # Training leftovers: a tokenizer that cuts or fills prompts would do so without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _template_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts in front of and behind a single text."""
    if backend.post_processor is None:
        return [], []
    pending = [json.loads(backend.post_processor.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["processors"] + pending
        elif step["type"] == "TemplateProcessing":
            return _split_template(step)
        elif step["type"] != "ByteLevel":  # which only touches offsets
            raise ModelLoadError(
                f"tokenizer.json has the post-processor {step['type'][:40]}; supported are "
                "TemplateProcessing and ByteLevel"
            )
    return [], []


def _split_template(step: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    prefix: list[int] = []
    suffix: list[int] = []
    ids = prefix
    for part in step["single"]:
        if "Sequence" in part:
            ids = suffix
        else:
            ids += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return prefix, suffix


def _affix(
    config: Mapping[str, Any], named: Mapping[str, int], role: str, template: list[int]
) -> list[int]:
    """The post-processor's tokens, unless add_bos_token or add_eos_token says otherwise."""
    wanted = config.get(f"add_{role}_token")
    if wanted is None:
        return template
    if not wanted:
        return [i for i in template if i != named.get(role)]
    return template or ([named[role]] if role in named else [])


def _named_ids(backend: tokenizers.Tokenizer, *configs: Mapping[str, Any]) -> dict[str, int]:
    """Ids of bos_token, eos_token ...; earlier files win. A token may be a text or an object."""
    named: dict[str, int] = {}
    for role in _ROLES:
        for config in configs:
            token = config.get(f"{role}_token")
            content = token.get("content") if isinstance(token, Mapping) else token
            token_id = backend.token_to_id(content) if isinstance(content, str) else None
            if token_id is not None:
                named.setdefault(role, token_id)
    return named


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path
) -> None:
    """Tokens that a SentencePiece model got after training, with the ids the files give them."""
    try:
        wanted = _configured_tokens(config, _optional_json(path / "added_tokens.json"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: added_tokens_decoder of tokenizer_config.json, or added_tokens.json, is "
            f"malformed: {type(error).__name__}: {str(error)[:100]}"
        ) from error
    backend.add_tokens([wanted[token_id] for token_id in sorted(wanted)])
    for token_id, token in wanted.items():
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise ModelLoadError(
                f"{path}: added token {token.content[:40]!r} shall have id {token_id}, but after "
                f"the vocabulary's own tokens it gets {found}"
            )


def _configured_tokens(
    config: Mapping[str, Any], older: Mapping[str, Any]
) -> dict[int, AddedToken]:
    wanted = {int(i): AddedToken(content, normalized=False) for content, i in older.items()}
    for token_id, entry in config.get("added_tokens_decoder", {}).items():
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        given = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        wanted[int(token_id)] = AddedToken(entry["content"], **given)
    return wanted


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, MAX_JSON_BYTES) if path.is_file() else {}
