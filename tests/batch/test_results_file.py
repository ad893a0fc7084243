"""The results file: what a sudden end leaves is repaired, and foreign files are left alone."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch import results_file
from jaxserve.batch.errors import BatchFileError
from jaxserve.batch.input_file import InputFile
from jaxserve.batch.results_file import ResultsFile, custom_id_key, result_id

NUM_LINES = 5


@pytest.fixture
def source(tmp_path: Path) -> InputFile:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"n":{number}}}\n' for number in range(1, NUM_LINES + 1)))
    return InputFile(path)


def record(source: InputFile, number: int, status: int = 200, text: str = "hé\n") -> bytes:
    (line,) = [line for line in source.lines() if line.number == number]
    fields: dict[str, Any] = {
        "id": result_id(number, line.digest),
        "custom_id": f"id{number}",
        "response": {"status_code": status, "request_id": "r", "body": {"text": text}},
        "error": None,
    }
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def read_done(path: Path, source: InputFile) -> list[int]:
    with ResultsFile(path, source) as results:
        return [n for n in range(1, NUM_LINES + 1) if results.is_done(n)]


def test_what_was_appended_is_known_the_next_time(source: InputFile, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultsFile(path, source) as results:
        results.append(4, record(source, 4), failed=False)
        results.append(2, record(source, 2, status=400), failed=True)
        assert path.read_bytes().count(b"\n") == 2  # at once
        assert [results.is_done(n) for n in (1, 2, 4)] == [False, True, True]
    with ResultsFile(path, source) as results:
        assert (results.num_done, results.num_failed) == (2, 1)
        assert results.id_key(4) == custom_id_key("id4")
        assert results.id_key(1) == 0
    assert path.read_bytes() == record(source, 4) + record(source, 2, status=400)


def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(source: InputFile, tmp_path: Path) -> None:
    whole, torn = record(source, 1), record(source, 3)
    path = tmp_path / "out"
    for length in [*range(len(torn)), len(torn)]:
        path.write_bytes(whole + torn[:length])
        assert read_done(path, source) == ([1, 3] if length == len(torn) else [1]), length
        assert path.read_bytes() == (whole + torn if length == len(torn) else whole)


@pytest.mark.parametrize("rest", [b"\0" * 50, b"\0", b'{"id":"batch_req_3_0\0\0\0\n'])
def test_what_a_power_cut_leaves_is_cut_off(source: InputFile, tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(record(source, 1) + rest)
    assert read_done(path, source) == [1]
    assert path.read_bytes() == record(source, 1)


def test_foreign_files_are_refused_and_left_as_they_were(source: InputFile, tmp_path: Path) -> None:
    good = record(source, 1)
    other = good.replace(b"batch_req_1_", b"batch_req_2_")
    cases = {
        "line 1 is no result": b"my notes\n",
        "line 1 is no result of": b"my notes without a newline",
        "line 2 is no result": good + b"notes\n",
        "line 1 is no result of a": b"{}\n" + good,
        "line 1 is no result of a batch": b'{"id":"batch_req_1","id":5}\n' + good,
        "line 1 answers a line": other,
        "line 2 answers a line": good + other + good,
        "line 2 answers line 1 a second time": good + good,
        "line 1 answers a line that": good.replace(b"batch_req_1_", b"batch_req_99999999_"),
    }
    path = tmp_path / "out"
    for why, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(BatchFileError, match=f"does not belong to .*: {why}.*--overwrite"):
            ResultsFile(path, source)
        assert path.read_bytes() == content
        with ResultsFile(path, source, overwrite=True) as results:
            assert results.num_done == 0
        assert path.read_bytes() == b""


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_repaired(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        path.write_bytes(b"one\n")
        out = Path(folder) / "out"
        out.write_bytes(content)
        try:
            with ResultsFile(out, InputFile(path)) as results:
                assert results.num_done == 0
            assert out.read_bytes() == b""
        except BatchFileError:
            assert out.read_bytes() == content


def test_only_one_run_at_a_time(source: InputFile, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultsFile(path, source):
        for overwrite in (False, True):
            with pytest.raises(BatchFileError, match="another run is writing"):
                ResultsFile(path, source, overwrite=overwrite)
    ResultsFile(path, source).close()


def test_places_that_cannot_hold_results(source: InputFile, tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="is the input"):
        ResultsFile(source.path, source, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(source.path)
    with pytest.raises(BatchFileError, match="is the input"):
        ResultsFile(link, source, overwrite=True)
    with pytest.raises(BatchFileError, match="not a regular file"):
        ResultsFile(Path("/dev/null"), source)
    with pytest.raises(BatchFileError, match=r"cannot write .*No such file"):
        ResultsFile(tmp_path / "none" / "out", source)
    assert source.path.read_bytes()


def test_a_full_disk_takes_nothing_half_written(
    source: InputFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    real = os.write
    room = 100

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, bytes(data)[:room])
        room -= written
        return written

    with ResultsFile(path, source) as results:
        results.append(1, record(source, 1), failed=False)
        monkeypatch.setattr(results_file.os, "write", write)
        with pytest.raises(BatchFileError, match=r"cannot write .*No space left"):
            results.append(2, record(source, 2), failed=False)
        assert not results.is_done(2)
    assert path.read_bytes() == record(source, 1)


def test_closing_cuts_off_what_an_interrupt_left(source: InputFile, tmp_path: Path) -> None:
    path = tmp_path / "out"
    results = ResultsFile(path, source)
    results.append(1, record(source, 1), failed=False)
    os.write(results._fd, b'{"id":"batch')  # the interrupt came inside append
    results.close()
    assert path.read_bytes() == record(source, 1)


def test_results_reach_the_disk_now_and_then(
    source: InputFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(results_file.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    monkeypatch.setattr(results_file, "SYNC_SECONDS", 1000.0)
    with ResultsFile(tmp_path / "out", source) as results:
        results.append(1, record(source, 1), failed=False)
        assert synced == []
        monkeypatch.setattr(results_file, "SYNC_SECONDS", 0.0)
        results.append(2, record(source, 2), failed=False)
        assert len(synced) == 1
    assert len(synced) == 2
