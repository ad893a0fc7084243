"""`jaxserve batch` as typed: exit status, what it says, stopping and going on."""

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from jaxserve.cli import batch, engine_start
from jaxserve.cli.main import app
from tests.support.client_harness import eventually
from tests.support.fake_start import FakeStart


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> FakeStart:
    fake = FakeStart(list(b"answer"))
    monkeypatch.setattr(engine_start, "start_engine", fake)
    monkeypatch.setattr("jaxserve.loading.hub.resolve", lambda name: name)
    return fake


def write(path: Path, count: int, **body: Any) -> Path:
    body = {"prompt": "x"} | body
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


def custom_ids(path: Path) -> list[str]:
    return sorted(json.loads(text)["custom_id"] for text in path.read_text().splitlines())


def test_all_answered_is_exit_status_0(start: FakeStart, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", 3), tmp_path / "out"
    result = run(source, out, "--model", "fake", "--max-num-seqs", 2, "--no-prefix-cache")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert re.search(r"lines 3/3, in \d+ tok/s, out \d+ tok/s\n", result.stderr)
    assert "3 of 3 lines answered, 0 failed; the results are in" in result.stderr
    assert custom_ids(out) == ["r0", "r1", "r2"]
    (options,) = start.options
    assert options.model == "fake"
    assert (options.config.max_batch_rows, options.config.prefix_cache) == (2, False)
    assert start.engines[0].num_open == 0


def test_failed_lines_are_counted_and_exit_status_1(start: FakeStart, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", 2), tmp_path / "out"
    with source.open("a") as file:
        file.write("not json\n")
    for attempt in range(2):  # the second finds all done, and says the same
        result = run(source, out)
        assert result.exit_code == 1
        assert "2 of 3 lines answered, 1 failed" in result.stderr
        assert len(start.engines) == 1
        assert ("out has 3 results; 0 lines are left" in result.stderr) == (attempt == 1)
    assert "lines 3/3" not in result.stderr


def test_names_that_lines_may_ask_for(start: FakeStart, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", 1, model="gpt-4o"), tmp_path / "out"
    assert run(source, out).exit_code == 1
    assert run(source, out, "--overwrite", "--served-model-name", "gpt-4o").exit_code == 0
    assert json.loads(out.read_text())["response"]["body"]["model"] == "gpt-4o"


def test_wrong_usage_is_exit_status_2(start: FakeStart, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", 1), tmp_path / "out"
    out.write_text("a diary\n")
    cases = {
        "does not exist": (tmp_path / "none", out),
        "is the input": (source, source),
        "does not belong to": (source, out),
        "No such file": (source, tmp_path / "none" / "out"),
        "Missing argument": (source,),
    }
    for words, arguments in cases.items():
        result = run(*arguments)
        assert result.exit_code == 2, words
        assert words in re.sub(r"[\s│]+", " ", result.stderr)
    assert out.read_text() == "a diary\n"
    assert start.engines == []
    assert run(source, out, "--overwrite").exit_code == 0
    assert custom_ids(out) == ["r0"]


def test_empty_input_is_done(start: FakeStart, tmp_path: Path) -> None:
    result = run(write(tmp_path / "in", 0), tmp_path / "out")
    assert result.exit_code == 0
    assert "0 of 0 lines answered" in result.stderr
    assert start.engines == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_and_gone_on_with(
    start: FakeStart, tmp_path: Path, number: signal.Signals
) -> None:
    source = write(tmp_path / "in", 30, max_tokens=20, ignore_eos=True)
    out = tmp_path / "out"
    start.step_seconds = 0.01

    def stop() -> None:
        eventually(lambda: out.exists() and out.stat().st_size > 0)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    before = signal.getsignal(number)
    result = run(source, out)
    thread.join()
    assert signal.getsignal(number) == before
    assert result.exit_code == 130
    done = len(out.read_text().splitlines())
    assert 0 < done < 30
    assert f"stopped: {out} has {done} of 30 results" in result.stderr
    assert "the same command again goes on from here" in result.stderr
    assert start.engines[0].num_open == 0

    start.step_seconds = 0.0
    result = run(source, out)
    assert result.exit_code == 0, result.output
    assert f"has {done} results; {30 - done} lines are left" in result.stderr
    assert custom_ids(out) == sorted(f"r{n}" for n in range(30))
    assert len(start.engines[1].added) == 30 - done


def test_stopped_while_loading_ends_at_once(
    start: FakeStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(batch.os, "_exit", leave)
    start.error = KeyboardInterrupt()  # type: ignore[assignment]
    source, out = write(tmp_path / "in", 3), tmp_path / "out"
    result = run(source, out)
    assert result.exit_code == 130
    assert "stopped while loading" in result.stderr
    start.error = None
    assert run(source, out).exit_code == 0


def test_full_disk_is_one_line_and_exit_status_1(
    start: FakeStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxserve.batch import results_file

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    source, out = write(tmp_path / "in", 3), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(results_file.os, "write", full)
        result = run(source, out)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (f"error: cannot write {out}: No space left on device")
    assert start.engines[0].num_open == 0
    assert run(source, out).exit_code == 0
