"""Traced programs on disk: what is read is what was written, in a folder of one's own."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core import program_store
from jaxserve.core.compile_cache import make_private
from jaxserve.core.program_store import ProgramStore

KEY, OTHER = "a" * 64, "b" * 64
DATA = b"line\nanother\0\xff"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "traced"


def test_what_was_saved_comes_back(folder: Path) -> None:
    ProgramStore(folder).save(KEY, DATA)
    store = ProgramStore(folder)
    assert store.load(KEY) == DATA
    assert store.load(OTHER) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.traced"]  # nothing left over


def test_what_was_saved_last_counts(folder: Path) -> None:
    store = ProgramStore(folder)
    store.save(KEY, DATA)
    store.save(KEY, b"")
    assert store.load(KEY) == b""


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_is_seen(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("bits") / "traced"
    store = ProgramStore(folder)
    store.save(KEY, DATA)
    path = folder / f"{KEY}.traced"
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)
    assert store.load(KEY) is None


@pytest.mark.parametrize("kept", [0, 1, 40, 150])
def test_a_file_cut_short_or_under_another_name_is_not_read(folder: Path, kept: int) -> None:
    store = ProgramStore(folder)
    store.save(KEY, DATA)
    path = folder / f"{KEY}.traced"
    (folder / f"{OTHER}.traced").write_bytes(path.read_bytes())
    assert store.load(OTHER) is None
    path.write_bytes(path.read_bytes()[:kept])
    assert store.load(KEY) is None


def test_lists_of_keys(folder: Path) -> None:
    store = ProgramStore(folder)
    assert store.load_keys(KEY) == ()
    store.save_keys(KEY, [OTHER, KEY])
    assert store.load_keys(KEY) == (OTHER, KEY)


def test_the_oldest_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "MAX_FILES", 3)
    store = ProgramStore(folder)
    for index in range(5):
        key = f"{index:064x}"
        store.save(key, DATA)
        os.utime(folder / f"{key}.traced", (index, index))
    assert [store.load(f"{index:064x}") is not None for index in range(5)] == [
        False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_write_to_is_left_alone(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    ProgramStore(folder).save(KEY, DATA)
    folder.chmod(mode)
    store = ProgramStore(folder)
    assert "others may write" in caplog.text
    assert "chmod go-w" in caplog.text
    assert store.load(KEY) is None
    store.save(OTHER, DATA)
    assert len(list(folder.iterdir())) == 1


def test_a_folder_of_another_user_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner}" in (make_private(folder) or "")


def test_a_path_that_is_no_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert ProgramStore(folder).load(KEY) is None
    assert "cannot be made" in caplog.text


def test_a_full_disk_costs_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store.save(KEY, DATA)
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []
