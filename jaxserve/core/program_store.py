"""Traced programs on disk: what a start would otherwise trace again, a second for each.

A file holds one program as JAX exports it (StableHLO, no machine code), after a line of JSON that
says what it is. JAX's own cache, beside it, holds what XLA makes of it. Files are written whole,
under a temporary name first, and read only if their content is what was written.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.compile_cache import make_private

log = logging.getLogger(__name__)

MAX_FILES = 512  # of about 100 KB; an engine has ten. The oldest go
_MAX_BYTES = 256 << 20
_SUFFIX = ".traced"


class ProgramStore:
    """Programs by key, a SHA-256 in hex that names all a program depends on."""

    def __init__(self, folder: Path) -> None:
        """A folder that cannot be made, or that others may write to, is neither read nor written:
        a warning says so."""
        problem = make_private(folder)
        if problem is not None:
            log.warning("traced programs are not kept, so every start is slow: %s", problem)
        self._folder = folder if problem is None else None

    def load(self, key: str) -> bytes | None:
        """The program's bytes; None if it is not there or not what was saved."""
        path = self._path(key)
        if path is None:
            return None
        try:
            if path.stat().st_size > _MAX_BYTES:
                return None
            header, _, data = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        return data if header == _header(key, data) else None

    def save(self, key: str, data: bytes) -> None:
        """Keep a program. A full disk costs the next start its time, nothing else."""
        path = self._path(key)
        if path is None:
            return
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                file = Path(folder) / path.name
                file.write_bytes(_header(key, data) + b"\n" + data)
                os.replace(file, path)
            self._remove_oldest()
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)

    def load_keys(self, key: str) -> tuple[str, ...]:
        """The keys saved under `key`; none if there are none."""
        data = self.load(key)
        return () if data is None else tuple(data.decode().split())

    def save_keys(self, key: str, keys: Sequence[str]) -> None:
        """Keep which programs a start needed first."""
        data = "\n".join(keys).encode()
        if self.load(key) != data:
            self.save(key, data)

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / (key + _SUFFIX)

    def _remove_oldest(self) -> None:
        assert self._folder is not None
        files = [path for path in self._folder.iterdir() if path.suffix == _SUFFIX]
        if len(files) > MAX_FILES:
            by_age = sorted(files, key=lambda path: path.stat().st_mtime)
            for path in by_age[: len(files) - MAX_FILES]:
                path.unlink(missing_ok=True)


def _header(key: str, data: bytes) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    return json.dumps({"key": key, "bytes": len(data), "sha256": digest}).encode()
