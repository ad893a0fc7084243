"""What every token id says, as bytes: the one table behind decoding, streaming and logprobs.

A token of a byte-level vocabulary may hold part of a character, so ids are turned into bytes first
and bytes into text last. Reading the table from the `tokenizers` decoder once, instead of calling
that decoder per token, makes a streamed answer equal to the whole one by construction and costs
a list look-up per token.

Bytes that are not UTF-8 become U+FFFD as the vocabulary's own decoder would write it: one for each
broken sequence in a byte-level vocabulary (Unicode 3.9, maximal subparts), one for each byte of it
in a SentencePiece vocabulary.
"""

import codecs
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from jaxserve.errors import InvalidRequestError, ModelLoadError

_EACH_BYTE = "jaxserve.replace_each_byte"
_SPACE = "\u2581"  # SentencePiece writes a space as this character


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenText:
    """Bytes per id, and how bytes become text. Immutable, so any thread may read it.

    spoken: the bytes of every id, b"" for ids without a token. visible: the same with special
    tokens silent. strip_first_space: the first space of a text is the tokenizer's own, not the
    user's. errors: codecs error handler for bytes that are not UTF-8.
    """

    def __init__(
        self,
        spoken: Sequence[bytes],
        special_ids: Iterable[int] = (),
        *,
        strip_first_space: bool = False,
        errors: str = "replace",
    ) -> None:
        visible = list(spoken)
        for token_id in special_ids:
            visible[token_id] = b""
        self.spoken = tuple(spoken)
        self.visible = tuple(visible)
        self.strip_first_space = strip_first_space
        self.errors = errors

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of a whole sequence; InvalidRequestError for an id outside the vocabulary."""
        table = self.visible if skip_special_tokens else self.spoken
        if ids and not (min(ids) >= 0 and max(ids) < len(table)):
            wrong = next(i for i in ids if not 0 <= i < len(table))
            raise InvalidRequestError(
                f"token id {str(wrong)[:40]} is outside the vocabulary of {len(table)} ids"
            )
        text = b"".join([table[i] for i in ids]).decode("utf-8", self.errors)
        return text[1:] if self.strip_first_space and text.startswith(" ") else text


def token_text(backend: tokenizers.Tokenizer) -> TokenText:
    """Read the table off a tokenizer; ModelLoadError for a decoder it cannot stand for exactly."""
    added = backend.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    vocabulary = backend.get_vocab(with_added_tokens=True)
    spoken = [b""] * (max(vocabulary.values(), default=-1) + 1)
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        plain = {piece: i for piece, i in vocabulary.items() if i not in added}
        for token_id, data in zip(plain.values(), _byte_level(list(plain)), strict=True):
            spoken[token_id] = data
        for token_id, token in added.items():
            spoken[token_id] = token.content.encode()
        return TokenText(spoken, special)
    if not steps:  # the library then joins tokens with spaces
        for piece, token_id in vocabulary.items():
            spoken[token_id] = b" " + piece.encode()
        return TokenText(spoken, special, strip_first_space=True)
    if not all(_is_sentencepiece_step(step) for step in steps):
        raise ModelLoadError(
            f"the tokenizer's decoder is {' + '.join(kinds)[:200]}; supported are ByteLevel and "
            "SentencePiece's (Replace, ByteFallback, Fuse, Strip, Metaspace)"
        )
    plain_bytes = _with_spaces(list(vocabulary))
    for token_id, data in zip(vocabulary.values(), plain_bytes, strict=True):
        spoken[token_id] = data
    if "ByteFallback" in kinds:
        for byte in range(256):
            if (found := vocabulary.get(f"<0x{byte:02X}>")) is not None:
                spoken[found] = bytes([byte])
    return TokenText(
        spoken,
        special,
        strip_first_space=any(_strips_first_space(step) for step in steps),
        errors=_EACH_BYTE,
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as a flat list of its steps' JSON."""
    if backend.decoder is None:
        return []
    pending, steps = [json.loads(backend.decoder.__getstate__())], []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            steps.append(step)
    return steps


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return step["pattern"] == {"String": _SPACE} and step["content"] == " "
        case "Strip":
            return step["content"] == " " and step["start"] <= 1 and step["stop"] == 0
        case "Metaspace":
            return step["replacement"] == _SPACE
    return False


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step["type"] == "Strip" and step["start"] == 1


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _ALPHABET.items()})


def _byte_level(pieces: list[str]) -> list[bytes]:
    """The bytes each piece spells; a piece with other characters is plain text (as the library)."""
    joined = "".join(pieces)
    if not _ALPHABET.keys() >= set(joined):
        return [_byte_level([p])[0] if _ALPHABET.keys() >= set(p) else p.encode() for p in pieces]
    data = joined.translate(_TO_LATIN_1).encode("latin-1")
    ends = list(itertools.accumulate(map(len, pieces)))
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _with_spaces(pieces: list[str]) -> list[bytes]:
    """The UTF-8 of each piece with its spaces as spaces; all at once, for 10^5 pieces a model."""
    data = "\0".join(pieces).replace(_SPACE, " ").encode().split(b"\0")
    if len(data) == len(pieces):
        return data
    return [piece.replace(_SPACE, " ").encode() for piece in pieces]  # one of them holds a NUL
