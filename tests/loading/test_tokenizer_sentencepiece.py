"""SentencePiece vocabularies on `tokenizers`: the ids and texts of SentencePiece itself."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.loading.sentencepiece_backend import sentencepiece_backend
from jaxserve.loading.sentencepiece_model import read_sentencepiece_model
from jaxserve.loading.token_kinds import TokenKind
from jaxserve.loading.tokenizer import Tokenizer
from tests.support.toy_vocabularies import gguf_of_sentencepiece, texts, train_sentencepiece

USER_DEFINED = ("▁\n", "\n\n", "<tool>", "▁▁▁")
EDGES = ("", " ", "  ", "\n", "\nfoo", "a \nb", "▁", "▁▁a", "<tool>", "a <tool>  b", "      x")


def oracle_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def from_file(model: bytes, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.model"
    path.write_bytes(model)
    return Tokenizer(sentencepiece_backend(read_sentencepiece_model(path).vocabulary))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("symbols", [(), USER_DEFINED])
def test_b36_bpe_ids_equal_sentencepiece(
    prefix: bool, strip: bool, rule: str, symbols: tuple[str, ...], tmp_path: Path
) -> None:
    if rule == "nmt_nfkc":  # which would change a symbol with a newline: see below
        symbols = tuple(symbol for symbol in symbols if "\n" not in symbol)
    model = train_sentencepiece(
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=strip,
        normalization_rule_name=rule,
        user_defined_symbols=symbols,
    )
    oracle, tokenizer = oracle_of(model), from_file(model, tmp_path)
    for text in (*texts(), *EDGES):
        if symbols and strip and text == "<0x0A>":
            continue  # a whole text that spells a byte piece is taken for it
        if rule == "nmt_nfkc" and "\r\n" in text:
            continue  # the library maps the pair as one character
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids, text
        if not strip or not text.startswith("▁"):
            assert tokenizer.decode(ids) == oracle.decode(ids)


def test_unigram_ids_equal_sentencepiece(tmp_path: Path) -> None:
    """T5's settings. Runs of one character are left out: paths of equal score may differ."""
    model = train_sentencepiece(
        "unigram",
        remove_extra_whitespaces=True,
        normalization_rule_name="nmt_nfkc",
        user_defined_symbols=("<tool>",),
    )
    oracle, tokenizer = oracle_of(model), from_file(model, tmp_path)
    compared = [
        t for t in (*texts(), *EDGES) if "aaa" not in t and "---" not in t and "<0x" not in t
    ]
    assert len(compared) > 400
    for text in compared:
        assert tokenizer.encode(text) == oracle.encode(text), text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("symbols", [(), USER_DEFINED])
def test_b36_gguf_ids_equal_sentencepiece(prefix: bool, symbols: tuple[str, ...]) -> None:
    model = train_sentencepiece(add_dummy_prefix=prefix, user_defined_symbols=symbols)
    metadata = gguf_of_sentencepiece(model, symbols, add_space_prefix=prefix)
    if symbols:
        assert " \n" in metadata["tokenizer.ggml.tokens"]
    oracle, tokenizer = oracle_of(model), tokenizer_from_gguf(metadata)
    for text in (*texts(), *EDGES):
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == [oracle.bos_id(), *ids], text
        assert tokenizer.decode(ids) == oracle.decode(ids)


def test_b36_byte_fallback() -> None:
    model = train_sentencepiece()
    oracle, tokenizer = oracle_of(model), tokenizer_from_gguf(gguf_of_sentencepiece(model))
    ids = tokenizer.encode("🦆", add_special_tokens=False)
    assert [oracle.id_to_piece(i) for i in ids[1:]] == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x86>"]
    assert tokenizer.decode(ids) == "🦆"


def test_without_byte_fallback_unknown_characters_become_one_unk() -> None:
    model = train_sentencepiece(byte_fallback=False)
    oracle, tokenizer = oracle_of(model), tokenizer_from_gguf(gguf_of_sentencepiece(model))
    for text in ("a🦆🦆b", "🦆", *texts()[:100]):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)


def test_a_special_token_starts_a_new_text() -> None:
    """As Meta's own code: BOS, then SentencePiece on the rest."""
    model = train_sentencepiece()
    oracle, tokenizer = oracle_of(model), tokenizer_from_gguf(gguf_of_sentencepiece(model))
    ids = [1, *oracle.encode("[INST] hi [/INST]"), 2, *oracle.encode(" x")]
    assert tokenizer.encode("<s>[INST] hi [/INST]</s> x", add_special_tokens=False) == ids


def test_gguf_defaults_are_llamas() -> None:
    metadata = gguf_of_sentencepiece(train_sentencepiece())
    for role in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{role}_token_id"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )
    assert tokenizer.adds_bos


def test_gguf_without_token_types_still_knows_bytes() -> None:
    model = train_sentencepiece()
    metadata = gguf_of_sentencepiece(model)
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_from_gguf(metadata)
    for text in texts():
        ids = oracle_of(model).encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == oracle_of(model).decode(ids)


@pytest.mark.parametrize("scores", [None, [0.0], "no list", ["x"] * 2000])
def test_gguf_scores_are_needed(scores: Any) -> None:
    metadata = gguf_of_sentencepiece(train_sentencepiece(), scores=scores)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_from_gguf(metadata)


def test_gemma_reaches_runs_of_spaces_by_merging() -> None:
    """As its tokenizer.json does: 8 and 9 spaces fit a piece, longer runs are halved by merges."""
    runs = tuple("▁" * length for length in range(2, 10))
    model = train_sentencepiece(add_dummy_prefix=False, user_defined_symbols=runs)
    metadata = gguf_of_sentencepiece(model, runs, add_space_prefix=False)
    lengths = {}
    for family in ("llama", "gemma3"):
        tokenizer = tokenizer_from_gguf(metadata | {"general.architecture": family})
        ids = tokenizer.encode("x" + " " * 12 + "y", add_special_tokens=False)
        lengths[family] = [len(tokenizer.id_to_token(i)) for i in ids[1:-1]]
        for length in range(2, 10):
            assert len(tokenizer.encode("x" + " " * length + "y")) == 4
    assert lengths == {"llama": [9, 3], "gemma3": [8, 4]}


def test_a_symbol_that_normalisation_changes_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(normalization_rule_name="nmt_nfkc", user_defined_symbols=("\n\n",))
    with pytest.raises(ModelLoadError, match="changed by its own normalisation"):
        from_file(model, tmp_path)


def test_settings_and_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_sentencepiece(user_defined_symbols=USER_DEFINED, pad_id=3))
    model = read_sentencepiece_model(path)
    assert model.named == {"unk": 0, "bos": 1, "eos": 2, "pad": 3}
    vocabulary = model.vocabulary
    assert vocabulary.kinds[:4] == [TokenKind.UNKNOWN, *[TokenKind.CONTROL] * 3]
    assert vocabulary.pieces[4:8] == list(USER_DEFINED)
    assert vocabulary.kinds[4:8] == [TokenKind.USER_DEFINED] * 4
    assert vocabulary.kinds.count(TokenKind.BYTE) == 256
    assert vocabulary.add_dummy_prefix
    assert vocabulary.byte_fallback
    assert not vocabulary.remove_extra_whitespaces
    assert not vocabulary.unigram
    assert vocabulary.charsmap == b""


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_model_file_is_an_error_or_loads(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(train_sentencepiece()[:600])
    cut = data.draw(st.integers(0, len(raw)))
    del raw[cut:]
    for _ in range(data.draw(st.integers(0, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    path.write_bytes(raw)
    with contextlib.suppress(ModelLoadError):  # anything else fails the test
        sentencepiece_backend(read_sentencepiece_model(path).vocabulary)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no pieces"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes at byte"),
        (b"\xff" * 12, "more than 10 bytes"),
        (b"\x08\x01", "a number where a text"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "model type 3"),
        (
            b"\x0a\x05\x15" + struct.pack("<f", 1.0) + b"\x12\x03\xc0\x01\x01",
            "whitespace as a suffix",
        ),
    ],
)
def test_damage_is_described(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=message):
        read_sentencepiece_model(path)
