"""Pulling from the Hugging Face Hub: the choice of files, and the client against a stand-in.

The stand-in speaks the few requests of the Hub that a pull makes, on loopback; the pull runs in a
process of its own because the client reads HF_ENDPOINT when it is imported.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxserve.errors import PullError
from jaxserve.loading.hf_download import HubFile, HubName, choose_files, parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DRIVER = """
import sys
from jaxserve.errors import PullError
from jaxserve.loading.hub import pull, resolve

class Printer:
    def say(self, text): print(text, file=sys.stderr, flush=True)
    def progress(self, what, done, total): pass

try:
    path = pull(sys.argv[1], Printer())
    assert resolve(sys.argv[1]) == path
    print(path)
except PullError as error:
    sys.exit(f"error: {error}")
"""


@dataclass
class Hub:
    """One repository, org/toy. `cut` names a file whose first download breaks off half-way."""

    files: dict[str, bytes] = field(default_factory=dict)
    large: tuple[str, ...] = ()  # listed with a SHA-256
    wrong: tuple[str, ...] = ()  # listed with a wrong SHA-256
    cut: str | None = None
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers for the repository `hub`, which a subclass sets."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/toy/tree/"):
            self.send(200, json.dumps(tree(self.hub)).encode(), body)
        elif path.startswith("/api/models/org/toy"):
            self.send(200, json.dumps(listing(self.hub)).encode(), body)
        elif path.startswith(f"/org/toy/resolve/{COMMIT}/"):
            self.send_file(path.rpartition("/")[2], body)
        else:
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send_file(self, name: str, body: bool) -> None:
        data = self.hub.files[name]
        start = 0
        if body:
            self.hub.asked.append(name)
            if wanted := self.headers.get("Range"):
                self.hub.ranges.append(f"{name} {wanted}")
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
        if body and name == self.hub.cut:
            self.hub.cut = None
            self.head(200, name, len(data))
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.head(206 if start else 200, name, len(data) - start, start)
        if body:
            self.wfile.write(data[start:])

    def head(self, status: int, name: str, length: int, start: int = 0) -> None:
        total = len(self.hub.files[name])
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("ETag", f'"{hashlib.sha256(self.hub.files[name]).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()

    def send(self, status: int, data: bytes, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def listing(hub: Hub) -> dict[str, object]:
    siblings = []
    for name, data in hub.files.items():
        row: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "x"}
        if name in hub.large:
            digest = "0" * 64 if name in hub.wrong else hashlib.sha256(data).hexdigest()
            row["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 100}
        siblings.append(row)
    return {"id": "org/toy", "modelId": "org/toy", "sha": COMMIT, "siblings": siblings, "tags": []}


def tree(hub: Hub) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": "x"}
        for name, data in hub.files.items()
    ]


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub(
        files={
            "config.json": b"{}",
            "model.safetensors": os.urandom(100_000),
            "tokenizer.json": b'{"a": 1}',
            "tokenizer.model": b"sp",
            "chat_template.jinja": b"{{ messages }}",
            "modeling_toy.py": b"raise SystemExit('code from a checkpoint ran')",
            "pytorch_model.bin": b"\x80\x04 a pickle",
            "README.md": b"# toy",
        },
        large=("model.safetensors",),
    )
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("ToyHandler", (Handler,), {"hub": served})
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def run_pull(hub: Hub, home: Path, name: str = "hf:org/toy") -> "subprocess.CompletedProcess[str]":
    settings = {
        "JAXSERVE_HOME": str(home),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-c", DRIVER, name],
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=120,
        check=False,
    )


def test_pull_takes_weights_and_settings_but_no_code(hub, tmp_path):
    done = run_pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "models" / "hf--org--toy"
    taken = {path.name: path.read_bytes() for path in folder.iterdir()}
    receipt = json.loads(taken.pop("receipt.json"))
    assert taken == {
        name: data
        for name, data in hub.files.items()
        if name.endswith((".safetensors", ".json", ".jinja", "tokenizer.model"))
    }
    assert receipt["source"] == f"hf:org/toy at commit {COMMIT}"
    assert "downloading 5 files (0 MB) of org/toy" in done.stderr

    before = len(hub.asked)
    again = run_pull(hub, tmp_path)
    assert again.stderr == "hf:org/toy is already there, checksum verified\n"
    assert len(hub.asked) == before


def test_a_broken_off_pull_continues(hub, tmp_path):
    hub.files["model.safetensors"] = os.urandom(24 << 20)  # the client writes pieces of 10 MiB
    hub.cut = "model.safetensors"
    done = run_pull(hub, tmp_path)
    if done.returncode != 0:  # the client gave up rather than resume by itself
        assert done.stderr.count("\n") == 2
        assert "pull again (it continues)" in done.stderr
        done = run_pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == hub.files[
        "model.safetensors"
    ]
    assert hub.ranges == [f"model.safetensors bytes={10 << 20}-"]


def test_a_wrong_checksum_is_refused_and_removed(hub, tmp_path):
    hub.wrong = ("model.safetensors",)
    done = run_pull(hub, tmp_path)
    assert done.returncode == 1
    assert "error: model.safetensors of org/toy has SHA-256" in done.stderr
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_unknown_repository_is_one_clear_line(hub, tmp_path):
    done = run_pull(hub, tmp_path, "hf:org/nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: org/nothing cannot be read (RepositoryNotFoundError)")
    assert done.stderr.count("\n") == 1


def test_a_gguf_repository_gives_the_file(hub, tmp_path):
    hub.files = {"toy-Q4_0.gguf": b"GGUF4", "toy-Q8_0.gguf": b"GGUF8", "config.json": b"{}"}
    hub.large = ()
    done = run_pull(hub, tmp_path, "hf:org/toy:q8_0")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "toy-Q8_0.gguf"
    assert hub.asked == ["toy-Q8_0.gguf"]


def names(*paths: str) -> list[HubFile]:
    return [HubFile(path, 1, None) for path in paths]


REPO = HubName("org/toy", None, None)


@pytest.mark.parametrize(
    ("listed", "taken"),
    [
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json", "consolidated.safetensors", "original/params.json"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json"],
        ),
        (["weights.safetensors", "a.gguf"], ["weights.safetensors"]),
        (["a.gguf", "config.json"], ["a.gguf"]),
        (
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ),
    ],
)  # fmt: skip
def test_choice_of_files(listed, taken):
    assert [file.path for file in choose_files(names(*listed), REPO)] == taken


def test_choice_that_cannot_be_made_lists_what_there_is():
    with pytest.raises(PullError, match=r"2 GGUF models that fit.*: a-Q4\.gguf, b-Q8"):
        choose_files(names("a-Q4.gguf", "b-Q8.gguf"), REPO)
    with pytest.raises(PullError, match=r"no weights.*GGUF files there: none"):
        choose_files(names("pytorch_model.bin"), REPO)
    many = names(*(f"{number}.gguf" for number in range(1000)))
    with pytest.raises(PullError, match="and 988 more"):
        choose_files(many, REPO)
    with pytest.raises(PullError, match="no GGUF file with 'Q9' in its name"):
        choose_files(names("a-Q4.gguf"), HubName("org/toy", None, "Q9"))


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("hf:org/name", HubName("org/name", None, None)),
        ("hf:org/name@v1.0", HubName("org/name", "v1.0", None)),
        ("hf:org/name-GGUF:Q4_K_M", HubName("org/name-GGUF", None, "Q4_K_M")),
        ("hf:a/b@refs/pr/1:q8", HubName("a/b", "refs/pr/1", "q8")),
    ],
)
def test_names(name, parsed):
    assert parse_hub_name(name) == parsed


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a b/c", "hf:" + "x" * 9999]
)
def test_names_that_are_none(name):
    with pytest.raises(PullError, match="is not a Hugging Face name") as caught:
        parse_hub_name(name)
    assert len(str(caught.value)) < 300
