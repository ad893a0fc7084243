"""Models of the Hugging Face Hub, fetched with huggingface_hub: weights and settings, never code.

Which files to take is decided here, from the repository's listing; the listing also gives the
commit that is pinned for the whole pull and the checksums of the large files.
"""

import glob
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import PullError
from jaxserve.loading.model_cache import (
    FileRecord,
    PullReporter,
    check_free_space,
    megabytes,
    sha256_of,
)

_NAME = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[\w./-]{1,100}))?(?::(?P<variant>[\w.-]{1,100}))?"
)
_WANTED_SUFFIXES = (".safetensors", ".json", ".jinja")
_WANTED_NAMES = ("tokenizer.model",)
_MAX_LISTED = 12


@dataclass(frozen=True)
class HubName:
    """`hf:org/name[@revision][:part of a GGUF file name]`, taken apart."""

    repo: str
    revision: str | None
    variant: str | None


@dataclass(frozen=True)
class HubFile:
    """One file of a repository's listing; sha256 is known for large (LFS) files only."""

    path: str
    size: int
    sha256: str | None


def parse_hub_name(name: str) -> HubName:
    """Raises PullError when `name` is not `hf:org/name[@revision][:variant]`."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise PullError(
            f"{name[:100]!r} is not a Hugging Face name; "
            "write hf:org/name, hf:org/name@revision or hf:org/name:Q4_K_M (one GGUF of several)"
        )
    return HubName(match["repo"], match["revision"], match["variant"])


def choose_files(files: Sequence[HubFile], name: HubName) -> tuple[HubFile, ...]:
    """The files to fetch, from the repository's top folder.

    With safetensors: these, the JSON files, the chat template and the tokenizer. Otherwise the one
    GGUF file (all shards of it) that the variant picks. Pickles and Python files are never taken.
    Raises PullError when there is nothing to load, or several GGUF files to choose from.
    """
    top = [file for file in files if "/" not in file.path]
    weights = [file for file in top if file.path.endswith(".safetensors")]
    ggufs = [file for file in top if file.path.endswith(".gguf")]
    if weights and name.variant is None:
        named = [file for file in weights if file.path.startswith("model")]
        others = [
            file
            for file in top
            if file.path in _WANTED_NAMES or file.path.endswith(_WANTED_SUFFIXES[1:])
        ]
        return tuple(named or weights) + tuple(others)  # "consolidated" copies would double it
    picked = [f for f in ggufs if name.variant is None or name.variant.lower() in f.path.lower()]
    if not picked:
        wanted = f"GGUF file with {name.variant!r} in its name" if name.variant else "weights"
        raise PullError(
            f"{name.repo} has no {wanted} (safetensors or GGUF, in its top folder); "
            f"{_listing(ggufs)}"
        )
    models = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", file.path) for file in picked}
    if len(models) > 1:
        raise PullError(
            f"{name.repo} has {len(models)} GGUF models that fit; pick one with "
            f"hf:{name.repo}:PART-OF-ITS-NAME; {_listing(picked)}"
        )
    return tuple(picked)


def _listing(files: Sequence[HubFile]) -> str:
    names = [file.path for file in files[:_MAX_LISTED]]
    more = len(files) - len(names)
    listed = ", ".join(names) if names else "none"
    return f"GGUF files there: {listed}" + (f" and {more} more" if more else "")


def fetch_repository(
    name: HubName, staging: Path, report: PullReporter
) -> tuple[str, tuple[FileRecord, ...]]:
    """Bring the chosen files into `staging`; returns (commit, what was fetched, checked).

    What an interrupted pull left there is continued. Raises PullError.
    """
    # imported here: it takes long, and only this command needs it
    from huggingface_hub import HfApi, snapshot_download

    _quieten()
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        listing = [_hub_file(sibling) for sibling in info.siblings or ()]
        chosen = choose_files(listing, name)
        total = sum(file.size for file in chosen)
        check_free_space(total)
        report.say(f"downloading {len(chosen)} files ({megabytes(total)}) of {name.repo}")
        snapshot_download(
            name.repo,
            revision=info.sha,
            local_dir=staging,
            allow_patterns=[glob.escape(file.path) for file in chosen],
            max_workers=4,
        )
    except PullError:
        raise
    except Exception as error:
        raise _pull_error(name, error) from error
    records = tuple(_checked(file, staging, name, report) for file in chosen)
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # the hub client's bookkeeping
    return str(info.sha), records


def _hub_file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(sibling.rfilename, int(sibling.size or 0), lfs.sha256 if lfs else None)


def _checked(file: HubFile, staging: Path, name: HubName, report: PullReporter) -> FileRecord:
    path = staging / file.path
    got = sha256_of(path, lambda done: report.progress(f"checking {file.path}", done, file.size))
    if file.sha256 is not None and got != file.sha256:
        shutil.rmtree(staging, ignore_errors=True)
        raise PullError(
            f"{file.path} of {name.repo} has SHA-256 {got}, wanted {file.sha256}; "
            "the download was removed, pull again"
        )
    return FileRecord(file.path, path.stat().st_size, got)


def _quieten() -> None:
    """Bars only where somebody watches; the client's warnings are in our errors anyway."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _pull_error(name: HubName, error: Exception) -> PullError:
    """One line for whatever the hub client raised."""
    if isinstance(error, OSError) and error.errno == 28:
        return PullError(
            f"the disk filled up while downloading {name.repo}; make room, or set JAXSERVE_HOME "
            "to a folder on another disk, and pull again (it continues)"
        )
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
        return PullError(
            f"{name.repo} cannot be read ({kind}): check the spelling and the revision; "
            "for a private or gated model, log in with 'hf auth login'"
        )
    if "Connect" in kind or "Timeout" in kind or kind in ("OfflineModeIsEnabled", "ProxyError"):
        return PullError(
            f"no connection to the Hugging Face Hub for {name.repo} ({kind}); "
            "check the network and HF_ENDPOINT, and pull again (it continues)"
        )
    text = " ".join(str(error).split())[:200]
    return PullError(f"downloading {name.repo} failed ({kind}): {text}; pull again (it continues)")
