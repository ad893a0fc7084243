"""Where pulled models lie, how one is known to be complete, and who may write to it.

Layout under `home()`:
  models/<folder>/...        the files of one pulled model and its receipt.json
  staging/<folder>/...       what an unfinished pull has so far; a later pull goes on from there
  locks/<folder>.lock        held (flock) by the process that pulls
A model counts as pulled once its receipt exists: the receipt is written last, by an atomic rename.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import platformdirs

from jaxserve.errors import PullError

RECEIPT = "receipt.json"
LOCK_PATIENCE = 3600.0  # seconds to wait for another process's pull of the same model
_CHUNK = 1 << 20
_MAX_RECEIPT_BYTES = 1 << 20


class PullReporter(Protocol):
    """What a pull tells its user while it works."""

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


class SilentReporter:
    """For callers that want no output."""

    def say(self, text: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        pass


@dataclass(frozen=True)
class FileRecord:
    """One file of a pulled model: path relative to the model's folder, bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Receipt:
    """What was pulled. `entry` is the path to load, relative to the folder ("." = the folder)."""

    name: str
    source: str
    entry: str
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files)


def home() -> Path:
    """$JAXSERVE_HOME, or the platform's cache folder for jaxserve."""
    chosen = os.environ.get("JAXSERVE_HOME")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("jaxserve")


def folder_name(name: str) -> str:
    """The folder of a model name: `hf:org/model` becomes `hf--org--model`."""
    return name.replace(":", "--").replace("/", "--")


def model_folder(name: str) -> Path:
    return home() / "models" / folder_name(name)


def staging_folder(name: str) -> Path:
    """The (created) folder for the unfinished pull of `name`; same file system as the models."""
    folder = home() / "staging" / folder_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_receipt(folder: Path) -> Receipt | None:
    """The receipt of a pulled model whose files all have their recorded size, or None."""
    path = folder / RECEIPT
    try:
        if path.stat().st_size > _MAX_RECEIPT_BYTES:
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(FileRecord(**record) for record in fields.pop("files"))
        receipt = Receipt(files=files, **fields)
        complete = all((folder / file.path).stat().st_size == file.size for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return receipt if complete else None


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Mark the model as pulled."""
    partial = folder / (RECEIPT + ".part")
    partial.write_text(json.dumps(asdict(receipt), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / RECEIPT)


def is_intact(folder: Path, receipt: Receipt, report: PullReporter) -> bool:
    """Whether every file still has the content that was pulled (reads all of them)."""
    for record in receipt.files:
        path = folder / record.path
        if sha256_of(path, lambda done: report.progress("checking", done, receipt.size)) != (
            record.sha256
        ):
            report.say(f"{path} has changed since it was pulled")
            return False
    return True


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hex; `on_bytes` hears how many bytes are done."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


def check_free_space(needed: int) -> None:
    """Raise PullError when the cache's disk has fewer than `needed` bytes free."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"{folder} has {megabytes(free)} free; this pull needs {megabytes(needed)}. "
            "Make room, or set JAXSERVE_HOME to a folder on another disk"
        )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


@contextmanager
def pull_lock(name: str, report: PullReporter, patience: float = LOCK_PATIENCE) -> Iterator[int]:
    """Hold the right to pull `name`; yields the lock's file descriptor.

    A child process that inherits the descriptor keeps the lock while it lives, so a downloader
    whose parent was killed and a new pull never write to the same files. Raises PullError after
    `patience` seconds.
    """
    path = home() / "locks" / (folder_name(name) + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait_for_lock(descriptor, name, report, patience)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, name: str, report: PullReporter, patience: float) -> None:
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PullError(
                    f"another process has been pulling {name} for {patience:.0f} s; "
                    "wait for it or end it, then pull again"
                ) from None
        if not told:
            report.say(f"another process is pulling {name}; waiting for it")
            told = True
        time.sleep(0.1)
