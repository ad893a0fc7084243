"""The command as a whole: help, quick start, errors as one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.cli.main import app

COMMANDS = [
    *["serve", "chat", "generate", "batch", "pull", "models", "bench", "eval"],
    "audit-speculation",
]


def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """The real command in a process of its own."""
    command = [sys.executable, "-m", "jaxserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_does_not_wait_for_jax() -> None:
    code = (
        "import sys; from jaxserve.cli.main import app; "
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("jaxserve ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "no-such-model"],
        ["chat", "no-such-model", "-m", "hi"],
        ["generate", "no-such-model", "hi"],
    ],
)
def test_unknown_model_is_one_line_and_exit_code_1(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: 'no-such-model' is no file or folder")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--no-such-option"], 2, "No such option"),
        (["serve", "--kv-memory", "lots"], 2, "1GiB"),
        (["serve", "--port", "99999"], 2, "65535"),
        (["serve", "--max-batch-rows", "0"], 1, "max_batch_rows is 0"),
        (["serve", "--dtype", "int4"], 1, "float32"),
        (["serve", "--model-file", "no-such-file.py"], 2, "no-such-file.py"),
        (["chat", "--temperature", "-1"], 1, "temperature is -1"),
        (["generate", "smollm2"], 2, "PROMPT"),
        (["generate", "smollm2", "x", "--top-p", "2"], 1, "top_p is 2"),
    ],
)
def test_wrong_options_are_told_clearly(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert words in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_damaged_model_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    result = run("generate", str(path), "hello")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr
