"""The results of a batch, one line each, in a file that is right after any sudden end.

A line is appended by one write, and counts only with its newline at the end. What a kill -9 or a
power cut left behind the last whole line is cut off on the next start. A line's `id` names the
input line it answers and that line's digest, so the file alone says what is done, and whether it
belongs to an input.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxserve.batch.errors import BatchFileError
from jaxserve.batch.input_file import InputFile

SYNC_SECONDS = 2.0  # at most so much work is done again after a power cut
_ID = re.compile(r"batch_req_([1-9]\d{0,11})_([0-9a-f]{16})", re.ASCII)
_BEGINNING = b'{"id":"batch_req_'


def result_id(number: int, digest: int) -> str:
    """The `id` of the result of an input line."""
    return f"batch_req_{number}_{digest:016x}"


class ResultsFile:
    """The file, open and locked. Close it, or use it as a context manager.

    num_done, num_failed: results in it, and those of them without an answer.
    """

    def __init__(self, path: Path, source: InputFile, *, overwrite: bool = False) -> None:
        """Repair and read what is there; `overwrite` empties it instead.

        Raises BatchFileError if another run has it, or if it holds anything but results of
        `source`; it is then left as it was.
        """
        self.path = path
        self._source = source
        self._done = bytearray(source.num_lines)
        self._id_keys = array("Q", bytes(8 * source.num_lines))
        self.num_done = 0
        self.num_failed = 0
        self._last_sync = time.monotonic()
        self._fd = self._open_and_lock()
        try:
            self._size = 0 if overwrite else self._read()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def is_done(self, number: int) -> bool:
        """Whether line `number` of the input has its result."""
        return bool(self._done[number - 1])

    def id_key(self, number: int) -> int:
        """`custom_id_key` of the custom_id in the result of line `number`; 0: it has none."""
        return self._id_keys[number - 1]

    def append(self, number: int, line: bytes, *, failed: bool) -> None:
        """Write the result of an input line; `line` ends with its newline.

        It is the file's when this returns, and on the disk SYNC_SECONDS later. Raises
        BatchFileError, and takes back what was written, when there is no room.
        """
        rest, size = memoryview(line), len(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            # No call in between: Ctrl-C, which comes at calls, finds all of this done or nothing.
            self._size += size
            self._done[number - 1] = 1
            self.num_done += 1
            self.num_failed += failed
            if time.monotonic() - self._last_sync >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise BatchFileError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Cut off what an interrupt left half written, and see the rest onto the disk."""
        try:
            if os.fstat(self._fd).st_size != self._size:
                os.ftruncate(self._fd, self._size)
            self._sync()
        except OSError as error:
            raise BatchFileError(f"cannot write {self.path}: {error.strerror}") from None
        finally:
            os.close(self._fd)

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open_and_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise BatchFileError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BatchFileError(f"{self.path} is not a regular file; runs resume from it")
            if os.path.samestat(os.fstat(fd), self._source.path.stat()):
                raise BatchFileError(f"{self.path} is the input; give another file for the results")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise BatchFileError(f"another run is writing {self.path}; let it end") from None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._last_sync = time.monotonic()

    def _note(self, number: int, failed: bool) -> None:
        self._done[number - 1] = 1
        self.num_done += 1
        self.num_failed += failed

    # ------------------------------------------------------------------ what is there already

    def _read(self) -> int:
        """Note what is done; returns where the last whole line ends."""
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for count, (line, is_last) in enumerate(_with_last(file), start=1):
                record = _parse(line)
                if record is None:
                    if is_last and _is_torn(line):
                        return end
                    raise self._foreign(f"line {count} is no result of a batch")
                self._take_in(record, count)
                end += len(line)
        return end

    def _take_in(self, record: dict[str, Any], count: int) -> None:
        match = _ID.fullmatch(record["id"])
        number, digest = (int(match[1]), int(match[2], 16)) if match else (0, 0)
        if not self._source.has(number, digest):
            raise self._foreign(f"line {count} answers a line that {self._source.path} has not")
        if self._done[number - 1]:
            raise self._foreign(f"line {count} answers line {number} a second time")
        custom_id = record.get("custom_id")
        self._id_keys[number - 1] = custom_id_key(custom_id) if custom_id is not None else 0
        response = record.get("response")
        self._note(number, not (isinstance(response, dict) and response.get("status_code") == 200))

    def _foreign(self, why: str) -> BatchFileError:
        return BatchFileError(
            f"{self.path} does not belong to {self._source.path}: {why}. Give another file for "
            "the results, or --overwrite to lose what is in this one"
        )


def custom_id_key(custom_id: str) -> int:
    """64 bits that stand for a custom_id; 1 in 2**64 pairs of ids share them. Never 0."""
    data = custom_id.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) or 1


def _with_last(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines with their newlines, each with whether it is the last."""
    line = file.readline()
    while line:
        following = file.readline()
        yield line, not following
        line = following


def _parse(line: bytes) -> dict[str, Any] | None:
    """The result in a whole line; None if there is none."""
    if not line.endswith(b"\n") or not line.startswith(_BEGINNING):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    has_id = isinstance(record.get("id"), str)
    return record if has_id and isinstance(record.get("custom_id"), str | None) else None


def _is_torn(line: bytes) -> bool:
    """Whether a last line may be what a sudden end left of ours: its beginning, or only zeros."""
    begins = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
    return begins or not line.strip(b"\0")
