"""Hugging Face folders: which file is read, and what the small files beside it change."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from jaxserve.errors import ModelLoadError
from jaxserve.loading.hf_tokenizer import tokenizer_from_folder
from tests.support.toy_vocabularies import texts, train_byte_level, train_sentencepiece

BOS_TEMPLATE = processors.Sequence(
    [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]),
    ]
)


def backend() -> tokenizers.Tokenizer:
    return train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def write(folder: Path, made: tokenizers.Tokenizer | bytes, **configs: Any) -> Path:
    if isinstance(made, bytes):
        (folder / "tokenizer.model").write_bytes(made)
    else:
        made.save(str(folder / "tokenizer.json"))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_b36_tokenizer_json_gives_the_librarys_ids(tmp_path: Path) -> None:
    made = backend()
    made.post_processor = BOS_TEMPLATE
    tokenizer = tokenizer_from_folder(write(tmp_path, made))
    for text in texts():
        assert tokenizer.encode(text) == made.encode(text).ids
        assert tokenizer.encode(text, False) == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("value", [True, False])
def test_b36_flags_of_added_tokens_are_honoured(tmp_path: Path, flag: str, value: bool) -> None:
    made = backend()
    made.normalizer = normalizers.Lowercase()
    made.add_tokens([AddedToken("<Tool>", **{flag: value})])
    tokenizer = tokenizer_from_folder(write(tmp_path, made))
    for text in ("a  <Tool>  b", "a<tool>b", "x<Tool>y <TOOL> z", "<Tool>", " <Tool>\n<Tool>"):
        assert tokenizer.encode(text) == made.encode(text).ids


@pytest.mark.parametrize(
    ("config", "prefix", "suffix"),
    [
        ({}, [0], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": None}, [0], []),
        ({"add_eos_token": True}, [0], [1]),
    ],
)
def test_b04_bos_of_the_post_processor_and_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    made = backend()
    made.post_processor = BOS_TEMPLATE
    named = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    tokenizer = tokenizer_from_folder(write(tmp_path, made, tokenizer_config=named | config))
    plain = made.encode("hi", add_special_tokens=False).ids
    assert tokenizer.encode("hi") == [*prefix, *plain, *suffix]
    assert tokenizer.adds_bos == bool(prefix)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")


def test_add_bos_token_alone_is_enough(tmp_path: Path) -> None:
    config = {"add_bos_token": True, "bos_token": "<|bos|>"}
    tokenizer = tokenizer_from_folder(write(tmp_path, backend(), tokenizer_config=config))
    assert tokenizer.encode("hi")[0] == 0


def test_roles_may_be_in_special_tokens_map(tmp_path: Path) -> None:
    write(
        tmp_path,
        backend(),
        tokenizer_config={"bos_token": None, "eos_token": "<|eos|>"},
        special_tokens_map={"pad_token": "<|eos|>", "eos_token": "<|bos|>", "unk_token": "?none?"},
    )
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.eos_token == "<|eos|>"
    assert tokenizer.pad_token == "<|eos|>"
    assert tokenizer.bos_token is None
    assert tokenizer.unk_token is None


def test_truncation_and_padding_of_the_training_are_off(tmp_path: Path) -> None:
    """B14's kind: a prompt is never cut without a word."""
    made = backend()
    made.enable_truncation(8)
    made.enable_padding(length=64)
    tokenizer = tokenizer_from_folder(write(tmp_path, made))
    assert tokenizer.decode(tokenizer.encode("word " * 50)) == "word " * 50


def test_tokenizer_model_gives_sentencepieces_ids_and_a_bos(tmp_path: Path) -> None:
    model = train_sentencepiece()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = tokenizer_from_folder(write(tmp_path, model))
    for text in texts():
        assert tokenizer.encode(text) == [oracle.bos_id(), *oracle.encode(text)]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_tokens_added_to_a_tokenizer_model(tmp_path: Path) -> None:
    size = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece()).vocab_size()
    decoder = {
        "1": {"content": "<s>", "special": True, "normalized": False},
        str(size + 1): {"content": "<|im_end|>", "special": True, "normalized": False},
    }
    write(
        tmp_path,
        train_sentencepiece(),
        added_tokens={"<tool>": size},
        tokenizer_config={"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"},
    )
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_token_id == size + 1
    ids = tokenizer.encode("<tool>x<|im_end|>")
    assert ids[:2] == [1, size]
    assert ids[-1] == size + 1
    assert tokenizer.decode(ids) == "<tool> x"


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"added_tokens": {"<tool>": 10**6}}, "shall have id 1000000"),
        ({"added_tokens": {"<tool>": "x"}}, "malformed: ValueError"),
        ({"tokenizer_config": {"added_tokens_decoder": {"5": {}}}}, "malformed: KeyError"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "malformed: AttributeError"),
        ({"tokenizer_config": [1]}, "holds a JSON list"),
    ],
)
def test_malformed_small_files_are_named(
    tmp_path: Path, configs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_from_folder(write(tmp_path, train_sentencepiece(), **configs))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "9"}', '{"model": {"type": "X"}}'])
def test_a_damaged_tokenizer_json_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is damaged"):
        tokenizer_from_folder(tmp_path)


def test_a_post_processor_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    made = backend()
    made.post_processor = processors.BertProcessing(("<|eos|>", 1), ("<|bos|>", 0))
    with pytest.raises(ModelLoadError, match="post-processor BertProcessing"):
        tokenizer_from_folder(write(tmp_path, made))
