"""The index of an input: numbers, digests, bounds, and what happens when the file changes."""

import tracemalloc
from pathlib import Path

import pytest

from jaxserve.batch import input_file
from jaxserve.batch.errors import BatchFileError
from jaxserve.batch.input_file import InputFile


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_lines_have_the_numbers_an_editor_shows(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"b":2}\n\n{"c":3}'
    source = InputFile(write(tmp_path / "in", data))
    lines = list(source.lines())
    assert [line.number for line in lines] == [1, 4, 6]
    assert [line.data for line in lines] == [b'{"a":1}\r', b'{"b":2}', b'{"c":3}']
    assert (source.num_lines, source.num_requests) == (6, 3)
    assert source.has(4, lines[1].digest)
    assert not source.has(1, lines[1].digest)
    assert not source.has(0, 0)
    assert not source.has(7, 0)


def test_a_digest_does_not_depend_on_what_follows(tmp_path: Path) -> None:
    """Lines may be added to an input whose last one had no newline."""
    first = list(InputFile(write(tmp_path / "a", b"one\ntwo")).lines())
    longer = list(InputFile(write(tmp_path / "b", b"one\ntwo\nthree\n")).lines())
    assert [line.digest for line in first] == [line.digest for line in longer[:2]]
    assert len({line.digest for line in longer}) == 3


@pytest.mark.parametrize("size", [9, 10, 11, 35])
def test_a_long_line_is_read_in_pieces_and_kept_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(input_file, "_PIECE_BYTES", 4)
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 10)
    source = InputFile(write(tmp_path / "in", b"x" * size + b"\nnext\n"))
    long, following = source.lines()
    assert long.data == (b"x" * size if size <= 10 else None)
    assert (following.number, following.data) == (2, b"next")
    other = InputFile(write(tmp_path / "other", b"x" * (size - 1) + b"y\n"))
    assert not other.has(1, long.digest)


def test_a_huge_line_takes_no_more_memory_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "in"
    with path.open("wb") as file:
        file.truncate(60 << 20)  # zeros, and no newline: one line of 60 MiB
    tracemalloc.start()
    source = InputFile(path)
    (line,) = source.lines()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert line.data is None
    assert peak < 10 << 20


def test_a_changed_input_is_noticed_and_an_added_line_waits(tmp_path: Path) -> None:
    path = write(tmp_path / "in", b"one\ntwo\n")
    source = InputFile(path)
    path.write_bytes(b"one\ntwo\nthree\n")
    assert [line.number for line in source.lines()] == [1, 2]
    path.write_bytes(b"one\nTWO\n")
    lines = source.lines()
    assert next(lines).number == 1
    with pytest.raises(BatchFileError, match="was changed while it was read"):
        next(lines)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*No such file"):
        InputFile(tmp_path / "none")
    with pytest.raises(BatchFileError, match="not a regular file"):
        InputFile(Path("/dev/null"))
    empty = InputFile(write(tmp_path / "empty", b""))
    assert (empty.num_lines, list(empty.lines())) == (0, [])
