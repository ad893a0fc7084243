"""Streamed text equals the text of the whole sequence, for any ids and any way to split them."""

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxserve.loading.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.loading.tokenizer import Tokenizer
from tests.support.toy_vocabularies import (
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    texts,
    train_byte_level,
    train_sentencepiece,
)

KINDS = ["byte-level", "dummy prefix", "no prefix"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer_from_gguf(gguf_of_byte_level(train_byte_level(gpt2), "gpt-2"))
    return tokenizer_from_gguf(spm_metadata(kind == "dummy prefix"))


def spm_metadata(prefix: bool) -> dict[str, object]:
    model = train_sentencepiece(add_dummy_prefix=prefix)
    return gguf_of_sentencepiece(model, add_space_prefix=prefix, add_bos_token=False)


def stream(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    output: Sequence[int],
    sizes: Iterator[int],
    skip: bool = True,
) -> list[str]:
    """Deltas of an output that arrives in parts of the given sizes."""
    detokenizer = tokenizer.detokenizer(prompt, skip)
    deltas, start = [], 0
    while start < len(output):
        end = start + next(sizes)
        deltas.append(detokenizer.push(output[start:end]))
        start = end
    return [*deltas, detokenizer.finish()]


def ones() -> Iterator[int]:
    while True:
        yield 1


def draw_ids(data: st.DataObject, tokenizer: Tokenizer, name: str) -> list[int]:
    """Texts, raw bytes and arbitrary tokens, special ones among them."""
    some = st.integers(0, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    text = st.text(max_size=6).map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    emoji = st.sampled_from(["🦆", "é", "谁", " ", "  ", "x"]).map(tokenizer.encode)
    broken = emoji.flatmap(lambda ids: st.integers(0, len(ids)).map(lambda n: ids[:n]))
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda token_id: [token_id])
    parts = data.draw(st.lists(st.one_of(some, text, emoji, broken, special), max_size=12), name)
    return [token_id for part in parts for token_id in part]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_b28_any_split_of_any_ids_gives_the_text_of_the_whole(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = draw_ids(data, tokenizer, "prompt")
    output = draw_ids(data, tokenizer, "output")
    skip = data.draw(st.booleans(), "skip special tokens")
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1), "sizes")
    deltas = stream(tokenizer, prompt, output, (n for _ in ones() for n in [*sizes, 1]), skip)
    whole = tokenizer.decode([*prompt, *output], skip)
    # A character the prompt leaves open belongs to the output that completes it.
    before = "".join(stream(tokenizer, [], prompt, iter([len(prompt) or 1]), skip)[:-1])
    assert before + "".join(deltas) == whole
    assert all(c < "\ud800" or c > "\udfff" for delta in deltas for c in delta)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_shot_and_streamed_bytes_give_replacement_characters_alike(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    values = data.draw(st.lists(st.sampled_from(b"a\xc3\xa9\xf0\x9f\xa6\x86\xff\xed\xa0\x80\xc0")))
    ids = [_byte_token(tokenizer, kind, value) for value in values]
    text = tokenizer.decode(ids)
    assert "".join(stream(tokenizer, [], ids, ones())) == text
    if kind == "byte-level":
        assert text == bytes(values).decode("utf-8", "replace")
    else:  # SentencePiece's rule: each byte that belongs to no character
        assert text == sp_oracle(kind).decode(ids)


@cache
def sp_oracle(kind: str) -> sentencepiece.SentencePieceProcessor:
    model = train_sentencepiece(add_dummy_prefix=kind == "dummy prefix")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _byte_token(tokenizer: Tokenizer, kind: str, value: int) -> int:
    spelled = f"<0x{value:02X}>"
    if kind == "byte-level":  # GPT-2's alphabet: bytes without a printable sign start at U+0100
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        unprintable = [v for v in range(256) if chr(v) not in alphabet]
        number = unprintable.index(value) if value in unprintable else None
        spelled = chr(value) if number is None else chr(0x100 + number)
    token_id = tokenizer.token_to_id(spelled)
    assert token_id is not None
    return token_id


def pieces(tokenizer: Tokenizer, *names: str) -> list[int]:
    ids = [tokenizer.token_to_id(name) for name in names]
    return [token_id for token_id in ids if token_id is not None]


def test_b28_spaces_of_a_sentencepiece_stream() -> None:
    tokenizer = tokenizer_of("dummy prefix")
    ids = pieces(tokenizer, "▁", "▁the", "▁", "▁", "x", "▁")
    assert stream(tokenizer, [], ids, ones()) == ["", " the", " ", " ", "x", " ", ""]
    assert stream(tokenizer, tokenizer.encode("Q:"), ids[1:], ones())[0] == " the"
    bos = pieces(tokenizer, "<s>")
    assert stream(tokenizer, bos, ids[1:], ones())[0] == "the"
    assert stream(tokenizer, bos, ids[1:], ones(), skip=False)[0] == " the"
    bare = tokenizer_of("no prefix")
    assert stream(bare, [], pieces(bare, "▁the"), ones())[0] == " the"


@pytest.mark.parametrize("kind", KINDS)
def test_b28_round_trip_of_1000_texts_with_spaces(kind: str) -> None:
    tokenizer, rng = tokenizer_of(kind), random.Random(0)
    for text in texts() * 2:
        spaced = " " * rng.randrange(3) + text.replace(" ", " " * rng.randrange(1, 4))
        spaced = spaced.replace("<", "(").replace("▁", "_")  # special tokens, spelled spaces
        ids = tokenizer.encode(spaced)
        cut = rng.randrange(len(ids) + 1)
        while not spaced.startswith(tokenizer.decode(ids[:cut])):
            cut -= 1  # not inside a character
        deltas = stream(tokenizer, ids[:cut], ids[cut:], ones())
        assert tokenizer.decode(ids[:cut]) + "".join(deltas) == tokenizer.decode(ids) == spaced


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_is_emitted_whole_with_its_last_byte(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("🦆")
    assert len(ids) > 2
    ids = ids if kind == "byte-level" else ids[-4:]  # without the dummy prefix
    for start in range(len(ids)):
        silent = [""] * (len(ids) - start - 1)
        assert stream(tokenizer, ids[:start], ids[start:], ones()) == [*silent, "🦆", ""]


@pytest.mark.parametrize(("kind", "rest"), [("byte-level", "�"), ("no prefix", "���")])
def test_finish_gives_the_open_bytes_up(kind: str, rest: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("x🦆", add_special_tokens=False)[:-1]
    deltas = stream(tokenizer, [], ids, ones())
    assert deltas[-1] == rest
    assert "".join(deltas) == tokenizer.decode(ids)


def test_special_tokens_inside_a_character() -> None:
    """Skipped, they leave it whole, as decoding without them does; shown, they break it."""
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("🦆")
    ids.insert(1, 1)
    assert "".join(stream(tokenizer, [], ids, ones())) == "🦆" == tokenizer.decode(ids)
    shown = "".join(stream(tokenizer, [], ids, ones(), skip=False))
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.startswith("�<|eos|>�")


def test_pushing_nothing_gives_nothing() -> None:
    detokenizer = tokenizer_of("byte-level").detokenizer([])
    assert detokenizer.push([]) == ""
    assert detokenizer.finish() == ""
