"""Reads the lines of an input file of any size, one at a time, and knows them again.

An index of 8 bytes a line (a digest of its bytes) is kept: it tells whether results belong to this
input, and whether the input changes under our hands.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxserve.batch.errors import BatchFileError

MAX_LINE_BYTES = 16 << 20  # as the server's default for a body
_PIECE_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputLine:
    """number: from 1, blank lines count. data is None for a line above MAX_LINE_BYTES."""

    number: int
    digest: int
    data: bytes | None


class InputFile:
    """The index of a regular file. Raises BatchFileError if there is no such thing to read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests = array("Q")  # by line; 0: a blank line
        self.num_requests = 0
        with self._open() as file:
            for line in _read(file):
                self._digests.extend([0] * (line.number - 1 - len(self._digests)))
                self._digests.append(line.digest)
                self.num_requests += 1

    @property
    def num_lines(self) -> int:
        """Lines, up to the last that is not blank."""
        return len(self._digests)

    def has(self, number: int, digest: int) -> bool:
        """Whether line `number` is the one with this digest."""
        return 1 <= number <= self.num_lines and self._digests[number - 1] == digest

    def lines(self) -> Iterator[InputLine]:
        """The lines that are not blank, as they were indexed; what was added since is left out.

        Raises BatchFileError if they have changed.
        """
        with self._open() as file:
            for line in _read(file):
                if line.number > self.num_lines:
                    return
                if not self.has(line.number, line.digest):
                    raise BatchFileError(f"{self.path} was changed while it was read")
                yield line

    def _open(self) -> BinaryIO:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise BatchFileError(f"cannot read {self.path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise BatchFileError(f"{self.path} is not a regular file; it is read more than once")
        return file


def _read(file: BinaryIO) -> Iterator[InputLine]:
    """The lines that are not blank. No more than MAX_LINE_BYTES of one are in memory."""
    number = 0
    while piece := file.readline(_PIECE_BYTES):
        number += 1
        hasher = hashlib.blake2b(digest_size=8)
        kept = bytearray()
        fits = True
        while piece:
            content = piece.removesuffix(b"\n")
            hasher.update(content)
            fits = fits and len(kept) + len(content) <= MAX_LINE_BYTES
            if fits:
                kept += content
            else:
                kept.clear()
            if len(content) < len(piece):
                break
            piece = file.readline(_PIECE_BYTES)
        if number == 1 and kept.startswith(_BYTE_ORDER_MARK):
            del kept[: len(_BYTE_ORDER_MARK)]
        if fits and not kept.strip():
            continue
        digest = int.from_bytes(hasher.digest()) or 1  # 0 stands for blank lines
        yield InputLine(number, digest, bytes(kept) if fits else None)
