"""The face of a tokenizer: special tokens around a text, single tokens, ids it does not have."""

import threading
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.chat_template import ChatTemplate, encode_chat
from jaxserve.loading.tokenizer import Tokenizer
from tests.support.toy_vocabularies import texts, train_byte_level

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BOS, EOS = 0, 1


def byte_level(**options: Any) -> Tokenizer:
    return Tokenizer(train_byte_level(GPT2), named={"bos": BOS, "eos": EOS}, **options)


@pytest.mark.parametrize("text", ["hi", "", "<|bos|>hi", "hi<|eos|>", "<|bos|>"])
def test_b04_one_bos_and_one_eos_on_every_path(text: str) -> None:
    tokenizer = byte_level(prefix_ids=[BOS], suffix_ids=[EOS])
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert ids[-1] == EOS
    assert ids.count(EOS) == 1


def test_b04_templated_text_keeps_the_templates_bos_alone() -> None:
    tokenizer = byte_level(prefix_ids=[BOS])
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|bos|>"})
    text = template.render([{"role": "user", "content": "hi"}])
    assert encode_chat(tokenizer, text) == tokenizer.encode("hi")
    assert encode_chat(tokenizer, text).count(BOS) == 1


def test_named_tokens_are_none_where_the_model_has_none() -> None:
    tokenizer = byte_level()
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|bos|>", BOS)
    assert tokenizer.unk_token is None
    assert tokenizer.pad_token is None
    assert not tokenizer.adds_bos
    assert Tokenizer(train_byte_level(GPT2)).eos_token_id is None


def test_single_tokens_as_text() -> None:
    tokenizer = byte_level()
    emoji = tokenizer.encode("🦆", add_special_tokens=False)
    assert len(emoji) > 1
    assert "�" in tokenizer.id_to_token(emoji[0])
    the = tokenizer.encode(" the", add_special_tokens=False)
    assert "".join(map(tokenizer.id_to_token, the)) == " the"
    assert tokenizer.id_to_token(EOS) == "<|eos|>"
    assert tokenizer.token_to_id("<|eos|>") == EOS
    assert tokenizer.token_to_id("no such token") is None


@pytest.mark.parametrize("token_id", [-1, 10**30, None])
def test_ids_outside_the_vocabulary_are_refused(token_id: int | None) -> None:
    tokenizer = byte_level()
    token_id = tokenizer.vocab_size if token_id is None else token_id
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of") as raised:
        tokenizer.id_to_token(token_id)
    with pytest.raises(InvalidRequestError, match=str(token_id)[:30]):
        tokenizer.decode([0, token_id, 1])
    assert len(str(raised.value)) < 120


def test_holes_in_the_ids_say_nothing() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 4
    assert tokenizer.decode([0, 1, 2, 3]) == "ab"
    assert tokenizer.id_to_token(1) == ""


def test_half_a_surrogate_pair_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        byte_level().encode("a\ud83dx")


def test_a_panic_of_the_library_is_an_error_of_the_request() -> None:
    class Panicking:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            raise type("PanicException", (BaseException,), {})("bad split")

    backend = train_byte_level(GPT2)
    with pytest.raises(InvalidRequestError, match="fails on this text: bad split"):
        Tokenizer(Panicking()).encode("x")  # type: ignore[arg-type]


def test_added_tokens_keep_lstrip_rstrip_and_single_word() -> None:
    """B36: the library's ids are the reference."""
    backend = train_byte_level(GPT2)
    first = backend.get_vocab_size()
    flags = ("lstrip", "rstrip", "single_word")
    backend.add_tokens([AddedToken(f"<{flag}>", **{flag: True}) for flag in flags])
    tokenizer = Tokenizer(backend)
    text = "a  <lstrip> b <rstrip>  c x<single_word>y <single_word> z"
    ids = tokenizer.encode(text)
    assert [i for i in ids if i >= first] == [first, first + 1, first + 2]
    assert tokenizer.decode(ids) == "a<lstrip> b <rstrip>c x<single_word>y <single_word> z"
    assert tokenizer.special_ids == frozenset({0, 1, 2})


def test_decode_equals_the_library_on_byte_level_ids() -> None:
    backend = train_byte_level(GPT2)
    tokenizer = Tokenizer(backend)
    for text in texts():
        ids = backend.encode(text).ids[::2]  # every other token: broken characters as well
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Replace("x", "y")])
def test_a_decoder_that_is_not_understood_is_refused(decoder: decoders.Decoder) -> None:
    backend = train_byte_level(GPT2)
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="the tokenizer's decoder is"):
        Tokenizer(backend)


def test_metaspace_decoder_loses_the_dummy_space_alone() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "▁a": 1, "b": 2}, merges=[]))
    for scheme, text in (("always", " ab a"), ("never", "  ab a")):
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert Tokenizer(backend).decode([0, 1, 2, 1]) == text


def test_many_threads_may_use_one_tokenizer() -> None:
    tokenizer = byte_level()
    expected = [tokenizer.encode(text) for text in texts()]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts(), expected, strict=True):
            if tokenizer.encode(text) != ids or tokenizer.decode(ids, False) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
