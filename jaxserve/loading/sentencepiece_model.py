"""A SentencePiece `tokenizer.model`: pieces, kinds, scores and the settings that change ids.

The file is one protocol buffer message (sentencepiece_model.proto of google/sentencepiece). It is
read with a small walk over the wire format (protobuf.dev, "Encoding"), because only a dozen fields
matter and every length must be checked before it is believed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.loading.token_kinds import TokenKind

MAX_FILE_BYTES = 1 << 27
MAX_PIECES = 1 << 21
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """Everything the ids depend on. A score is a log-probability (unigram) or a rank (BPE).

    add_dummy_prefix: a space goes in front of a text. charsmap: the compiled normalisation rule,
    b"" for none. unk_id is the piece for what cannot be spelled.
    """

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    unk_id: int | None
    unigram: bool = False
    byte_fallback: bool = True
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True
    charsmap: bytes = b""


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary and the ids of its roles ("bos", "eos", "unk", "pad"), those it has."""

    vocabulary: SentencePieceVocabulary
    named: dict[str, int]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a tokenizer.model; ModelLoadError if it is damaged or of a kind not supported."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes, the limit is {MAX_FILE_BYTES}")
    try:
        return _parse_model(memoryview(path.read_bytes()))
    except (ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{path}: damaged or unsupported SentencePiece model: {error}") from (
            error
        )


def _parse_model(data: memoryview) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer = normalizer = memoryview(b"")
    for field, value in _fields(data):
        if field == 1:
            entry = dict(_fields(_message(value)))
            pieces.append(str(_message(entry.get(1, memoryview(b""))), "utf-8"))
            scores.append(_float(entry.get(2)))
            kinds.append(_signed(entry.get(3, TokenKind.NORMAL)))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
        elif field == 2:
            trainer = _message(value)
        elif field == 3:
            normalizer = _message(value)
    if not pieces:
        raise ValueError("it has no pieces")
    training, normalizing = dict(_fields(trainer)), dict(_fields(normalizer))
    model_type = _signed(training.get(3, _UNIGRAM))
    if model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"model type {model_type} is neither unigram (1) nor BPE (2)")
    if training.get(24):
        raise ValueError("it treats whitespace as a suffix, which is not supported")
    ids = {
        "unk": _signed(training.get(40, 0)),
        "bos": _signed(training.get(41, 1)),
        "eos": _signed(training.get(42, 2)),
        "pad": _signed(training.get(43, -1 & (1 << 64) - 1)),
    }
    named = {role: i for role, i in ids.items() if 0 <= i < len(pieces)}
    vocabulary = SentencePieceVocabulary(
        pieces,
        scores,
        kinds,
        named.get("unk"),
        unigram=model_type == _UNIGRAM,
        byte_fallback=bool(training.get(35, 0)),
        add_dummy_prefix=bool(normalizing.get(3, 1)),
        remove_extra_whitespaces=bool(normalizing.get(4, 1)),
        escape_whitespaces=bool(normalizing.get(5, 1)),
        charsmap=bytes(_message(normalizing.get(2, memoryview(b"")))),
    )
    return SentencePieceModel(vocabulary, named)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of one message: numbers, or the bytes of texts and messages."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _varint(data, offset)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, offset = _varint(data, offset)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {offset}")
        if length > len(data) - offset:
            raise ValueError(f"a field of {length} bytes at byte {offset} of {len(data)}")
        yield key >> 3, data[offset : offset + length]
        offset += length


def _varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        byte = data[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), offset + index + 1
    raise ValueError(f"a number of more than 10 bytes at byte {offset}")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a text or message belongs")
    return value


def _signed(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a text where a number belongs")
    return value - (1 << 64) if value >> 63 else value


def _float(value: int | memoryview | None) -> float:
    if value is None:
        return 0.0
    return float(struct.unpack("<f", _message(value))[0])
