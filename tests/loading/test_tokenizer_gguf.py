"""Byte-level tokenizers rebuilt from GGUF metadata: the ids of the tokenizer they came from."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from jaxserve.errors import ModelLoadError
from jaxserve.loading import hub
from jaxserve.loading.chat_template import ChatTemplate, encode_chat, template_from_gguf
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.loading.split_rules import split_rule
from jaxserve.loading.tokenizer import Tokenizer
from tests.support.toy_vocabularies import (
    GOLDENS,
    SPECIAL,
    gguf_of_byte_level,
    texts,
    train_byte_level,
)

# As their tokenizer.json files spell them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def originals() -> dict[str, tuple[pre_tokenizers.PreTokenizer, dict[str, Any]]]:
    """What each family's own tokenizer.json holds, from the library's ready-made parts."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": (gpt2, {}),
        "smollm": (pre_tokenizers.Sequence([digits, gpt2]), {}),
        "llama-bpe": (split_by(LLAMA3), {"ignore_merges": True}),
        "qwen2": (split_by(QWEN2), {}),
        "tekken": (split_by(TEKKEN), {"ignore_merges": True}),
    }


@cache
def pulled(model: str) -> tuple[Tokenizer, ChatTemplate | None]:
    metadata = GGUFFile(hub.resolve(model)).metadata
    tokenizer = tokenizer_from_gguf(metadata)
    return tokenizer, template_from_gguf(metadata, tokenizer)


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_b36_ids_equal_transformers_on_500_texts(model: str) -> None:
    tokenizer, _ = pulled(model)
    golden = json.loads((GOLDENS / f"{model}.json").read_text())
    decoded = {int(index): text for index, text in golden["decoded"].items()}
    for index, (text, ids) in enumerate(zip(texts(), golden["ids"], strict=True)):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == decoded.get(index, text)


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_reference_prompts_get_the_reference_ids(model: str) -> None:
    tokenizer, template = pulled(model)
    assert (template is None) == (model == "gemma3-270m")
    for item in json.loads((GOLDENS / "prompts.json").read_text())[model]:
        if template is None:
            assert tokenizer.encode(item["text"]) == item["ids"]
            continue
        assert template.render([{"role": "user", "content": item["user"]}]) == item["text"]
        assert encode_chat(tokenizer, item["text"]) == item["ids"]


@pytest.mark.model
def test_named_tokens_of_smollm2() -> None:
    tokenizer, _ = pulled("smollm2")
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert not tokenizer.adds_bos


@pytest.mark.parametrize("pre", list(originals()))
def test_b36_ids_equal_the_original_for_each_split_rule(pre: str) -> None:
    pre_tokenizer, options = originals()[pre]
    original = train_byte_level(pre_tokenizer, **options)
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    rebuilt = tokenizer_from_gguf(gguf_of_byte_level(original, pre))
    prefix = [0] if pre in ("llama-bpe", "tekken") else []  # their files say nothing: BOS
    for text in texts():
        ids = original.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text) == prefix + ids, text
        assert rebuilt.decode(ids, skip_special_tokens=False) == original.decode(ids, False)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345", " don", "'t", "\n\n ", " x", " é", " 谁", "  ", "7"]),
        ("smollm", ["1", "2", "3", "4", "5", " don", "'t", "\n\n ", " x", " é", " 谁", "  ", "7"]),
        ("llama-bpe", ["123", "45", " don", "'t", "\n\n", " ", " x", " é", " 谁", " ", " ", "7"]),
        (
            "qwen2",
            ["1", "2", "3", "4", "5", " don", "'t", "\n\n", " ", " x", " é", " 谁", " ", " ", "7"],
        ),
        (
            "tekken",
            ["1", "2", "3", "4", "5", " don", "'t", "\n\n", " ", " x", " é", " 谁", " ", " ", "7"],
        ),
    ],
)
def test_b36_cuts_of_the_reported_text(pre: str, pieces: list[str]) -> None:
    text = "12345 don't\n\n  x é 谁  7"
    if pre == "gpt-2":
        pieces = [*pieces[:-2], " ", " 7"]
    cuts = split_rule(pre).pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == pieces


def test_b36_unknown_split_rule_is_an_error() -> None:
    metadata = gguf_of_byte_level(train_byte_level(originals()["gpt-2"][0]), "from-the-future")
    with pytest.raises(ModelLoadError, match=r"'from-the-future'.*llama-bpe"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("pre", ["default", None])
def test_b36_unnamed_split_rule_is_gpt2s_with_a_loud_warning(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    original = train_byte_level(originals()["gpt-2"][0])
    rebuilt = tokenizer_from_gguf(gguf_of_byte_level(original, pre))
    assert "tokenizer.ggml.pre" in caplog.text
    for text in texts():
        assert rebuilt.encode(text) == original.encode(text).ids


def toy_metadata(**changes: Any) -> dict[str, Any]:
    metadata = gguf_of_byte_level(train_byte_level(originals()["gpt-2"][0]), "gpt-2")
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_padding_of_the_vocabulary_is_not_usable() -> None:
    metadata = toy_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(64)]
    metadata["tokenizer.ggml.token_type"] += [5] * 64
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.vocab_size == size
    assert max(tokenizer.encode("[PAD1]")) < size


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    metadata = toy_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<think>", "  \n", "<｜end▁of▁turn｜>"]
    metadata["tokenizer.ggml.token_type"] += [4, 4, 3]
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("a<think>b  \nc<｜end▁of▁turn｜>")
    assert [i for i in ids if i >= size] == [size, size + 1, size + 2]
    assert tokenizer.special_ids == {0, 1, 2, size + 2}
    assert tokenizer.decode(ids) == "a<think>b  \nc"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("c<｜end▁of▁turn｜>")


def test_without_token_types_the_named_tokens_are_special() -> None:
    metadata = toy_metadata()
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.encode("<|bos|>x")[0] == 0


def test_add_bos_and_add_eos_follow_the_file() -> None:
    tokenizer = tokenizer_from_gguf(toy_metadata(add_bos_token=True, add_eos_token=True))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [0, *plain, 1]
    assert tokenizer.adds_bos
    without = tokenizer_from_gguf(toy_metadata(add_bos_token=False))
    assert without.encode("hi") == plain


def test_duplicate_tokens_keep_the_first_id() -> None:
    metadata = toy_metadata()
    first = metadata["tokenizer.ggml.tokens"].index("a")
    metadata["tokenizer.ggml.tokens"].append("a")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert tokenizer_from_gguf(metadata).encode("a") == [first]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'; supported are gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is 'None'"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of strings"),
        ({"token_type": [1]}, "token_type must be a list of 700 kinds"),
        ({"token_type": "x" * 700}, "token_type must be a list of 700 kinds"),
        ({"pre": 7}, "tokenizer.ggml.pre is '7'"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a nosuchtoken"]}, "merges does not fit"),
        ({"merges": ["a b c"]}, "merges does not fit"),
        ({"merges": ["ab"]}, "merges does not fit"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "1"}, "eos_token_id is 1, but"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_from_gguf(toy_metadata(**changes))


def test_special_tokens_of_the_toy_are_where_the_tests_expect_them() -> None:
    assert toy_metadata()["tokenizer.ggml.tokens"][:3] == SPECIAL
