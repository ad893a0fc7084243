"""A text file as windows of tokens, a part of them held out.

Documents are what a form feed separates, or a line of <|endoftext|>; a text without either is one
document. Special tokens written in the text (chat markers) are read as such. Documents are packed
into windows of equal length; one that is longer than a window is cut.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.eval.evaluation import read_text
from jaxserve.loading.loaded_model import LoadedModel

MIN_DOCUMENT = 4  # tokens: fewer teach nothing, since the first draft guesses the third token
_SEPARATOR = re.compile(r"\f|^<\|endoftext\|>$", re.MULTILINE)
PADDING = -1  # the row of tokens that fill a window up


@dataclass(frozen=True)
class Windows:
    """N windows of L tokens, all [N, L] int32. rows: the document a token is of, or PADDING;
    positions: its place in the document, or in the piece of it that a window holds."""

    tokens: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(np.count_nonzero(self.rows != PADDING))

    def take(self, index: np.ndarray | slice) -> "Windows":
        """Some of them."""
        return Windows(self.tokens[index], self.rows[index], self.positions[index])

    def fingerprint(self) -> str:
        """Equal for equal windows, so that what was made from them is not used for others."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.rows, self.positions):
            digest.update(np.ascontiguousarray(array, "<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TrainingText:
    """What is learnt from, and what is only scored: every k-th document (window, if there are
    few documents) is held out."""

    train: Windows
    held_out: Windows


def read_training_text(
    path: Path, model: LoadedModel, length: int, held_out: float, max_tokens: int | None = None
) -> TrainingText:
    """The windows of a text file in the model's tokens. held_out: the share not learnt from.

    max_tokens: take the text's first tokens only. Raises InvalidRequestError for a file that is not
    text, or too short to hold anything out.
    """
    if length > model.max_model_len:
        raise InvalidRequestError(
            f"windows of {length} tokens; this model holds at most {model.max_model_len}", "window"
        )
    documents = _documents(read_text(path), model, max_tokens)
    every = max(2, round(1 / held_out))
    if len(documents) < 2 * every:  # one long text, say: its pieces take the place of documents
        documents = [piece for document in documents for piece in _pieces(document, length)]
    kept = [document for index, document in enumerate(documents) if index % every != every - 1]
    apart = [document for index, document in enumerate(documents) if index % every == every - 1]
    if not kept or not apart:
        total = sum(map(len, documents))
        raise InvalidRequestError(
            f"{path} has {total} tokens; want at least {every} windows of {length}, or as many "
            "documents, so that some can be held out",
            "text",
        )
    return TrainingText(pack(kept, length), pack(apart, length))


def _documents(text: str, model: LoadedModel, max_tokens: int | None) -> list[list[int]]:
    tokenizer = model.tokenizer
    documents, total = [], 0
    for part in _SEPARATOR.split(text):
        ids = tokenizer.encode(part.strip("\n"))
        if max_tokens is not None:
            ids = ids[: max_tokens - total]
        if len(ids) < MIN_DOCUMENT:
            continue
        if max(ids) >= model.vocab_size:
            raise InvalidRequestError(
                f"the text has token {max(ids)}, the model's vocabulary ends at "
                f"{model.vocab_size - 1}",
                "text",
            )
        documents.append(ids)
        total += len(ids)
    return documents


def _pieces(document: list[int], length: int) -> list[list[int]]:
    cut = [document[start : start + length] for start in range(0, len(document), length)]
    return [piece for piece in cut if len(piece) >= MIN_DOCUMENT]


def pack(documents: Sequence[list[int]], length: int) -> Windows:
    """Documents in order, several to a window where they fit, cut where they do not."""
    windows: list[list[list[int]]] = []
    room = 0
    for piece in (piece for document in documents for piece in _pieces(document, length)):
        if len(piece) > room:
            windows.append([])
            room = length
        windows[-1].append(piece)
        room -= len(piece)
    tokens = np.zeros((len(windows), length), np.int32)
    rows = np.full((len(windows), length), PADDING, np.int32)
    positions = np.zeros((len(windows), length), np.int32)
    for index, pieces in enumerate(windows):
        at = 0
        for row, piece in enumerate(pieces):
            own = slice(at, at + len(piece))
            tokens[index, own] = piece
            rows[index, own] = row
            positions[index, own] = np.arange(len(piece))
            at += len(piece)
    return Windows(tokens, rows, positions)
