"""`jaxserve eval` as typed, over a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from jaxserve.cli import evaluate
from jaxserve.cli.main import app
from jaxserve.loading import hub
from tests.support.tiny_engine import tiny_model

TEXT = "A careful person measures twice, in two different ways. " * 3


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text file; "tiny" is a model that a checkpoint's packed form differs from."""

    def load(name: str, options: Any, dtype: str, layout: Any, quantization: Any) -> Any:
        return tiny_model(seed=1 if quantization else 0, scale=3.0)

    monkeypatch.setattr(evaluate, "_load", load)
    resolve = hub.resolve
    monkeypatch.setattr(hub, "resolve", lambda name: name == "tiny" or resolve(name))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_perplexity(text: Path) -> None:
    result = run("tiny", "--text", str(text), "--context", "64")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "model     tiny"
    assert lines[3] == "scored    168 tokens, 168 bytes; windows of 64 tokens, 32 apart"
    assert [line.split("  ")[0] for line in lines[4:]] == [
        "perplexity",
        "nats per token",
        "bits per byte",
        "weights (MB)",
        "peak memory, all of it (MB)",
    ]
    assert result.stderr.splitlines() == ["tokens (168)"]


def test_against_float32(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    result = run(
        *["tiny", "--text", str(text), "--against", "float32", "--quantization", "int8"],
        *["--max-tokens", "100", "--stride", "100", "--context", "128", "--json", str(path)],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert (report["model"], report["against"]) == ("tiny", "float32")
    assert (report["num_scored_tokens"], report["context"], report["stride"]) == (100, 128, 100)
    assert report["kl_max"] >= report["kl_mean"] > 0
    assert report["num_flips_above_margin"] > 0
    assert report["peak_memory_bytes"] > 1 << 20
    assert "served         float32" in result.stdout
    assert f"{'flips':<32}{report['num_flips']:>9} of 100" in result.stdout
    assert result.stderr.splitlines()[-1] == f"written to {path}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--text", "missing.txt"], "cannot read missing.txt: No such file"),
        (["--context", "1000"], "holds at most 256 tokens"),
        (["--context", "64", "--stride", "64"], "stride is 64; give 1 to 63"),
        (["--against", "no-such-model"], "no-such-model"),
        (["--attention-backend", "tpu"], "no attention backend 'tpu'"),
        (["--dtype", "float8"], "dtype is 'float8'"),
    ],
)
def test_mistakes_are_one_line(text: Path, arguments: list[str], reason: str) -> None:
    result = run("tiny", "--text", str(text), *arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_an_empty_text_and_an_unknown_model(text: Path) -> None:
    text.write_text("\n")
    result = run("tiny", "--text", str(text))
    assert (result.exit_code, "is empty" in result.stderr) == (1, True)
    text.write_text(TEXT)
    result = run("no-such-model", "--text", str(text))
    assert (result.exit_code, "no-such-model" in result.stderr) == (1, True)
