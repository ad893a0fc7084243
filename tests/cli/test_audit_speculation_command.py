"""`jaxserve audit-speculation` as typed; what it calls is tested in tests/eval."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from jaxserve.cli import audit_speculation
from jaxserve.eval import output_comparison, speculation_audit
from jaxserve.eval.speculation_audit import Check
from jaxserve.loading import hub


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Check]]:
    """What the three parts find; "tiny" is a model."""
    checks = {
        "exact": [Check("classic drafts, exact distance", 3e-8, 1e-5, True)],
        "sampled": [Check("one-hot drafts, plain: p", 0.4, 1e-4, True)],
        "compared": [Check("token 1: p", 0.7, 2e-4, True)],
    }

    def compare(make, prompts, params, *, samples, say):
        say(f"{len(prompts)} prompts, {samples} samples of {params.max_tokens} tokens")
        with make(2, True):
            return checks["compared"]

    @contextmanager
    def llm(model, **options):
        assert model == "tiny"
        assert options["speculative_config"]["method"] in ("ngram", "suffix")
        yield None

    monkeypatch.setattr(speculation_audit, "exact_checks", lambda: checks["exact"])
    monkeypatch.setattr(speculation_audit, "sampled_checks", lambda draws: checks["sampled"])
    monkeypatch.setattr(output_comparison, "compare_outputs", compare)
    monkeypatch.setattr("jaxserve.llm.LLM", llm)
    resolve = hub.resolve
    monkeypatch.setattr(hub, "resolve", lambda name: name == "tiny" or resolve(name))
    return checks


def run(*arguments: str) -> Result:
    app = typer.Typer()
    audit_speculation.register(app)
    return CliRunner().invoke(app, list(arguments))


def test_the_toy_alone(found: dict[str, list[Check]]) -> None:
    result = run("--draws", "5000")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "toy, exactly",
        f"  ok   {'classic drafts, exact distance':<42}       3e-08   (limit 1e-05)",
        "toy, 5000 outputs each",
        f"  ok   {'one-hot drafts, plain: p':<42}         0.4   (limit 0.0001)",
    ]


def test_a_model_too_and_the_report(found: dict[str, list[Check]], tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    result = run(
        *["tiny", "--samples", "40", "--tokens", "2", "--prompt", "a", "--json", str(path)],
        *["--speculative-config", '{"method": "suffix"}'],
    )
    assert result.exit_code == 0, result.output
    assert "tiny\n  ok   token 1: p" in result.stdout
    assert result.stderr.splitlines() == [
        "1 prompts, 40 samples of 2 tokens",
        f"written to {path}",
    ]
    names = [check["name"] for check in json.loads(path.read_text())["checks"]]
    assert names == ["classic drafts, exact distance", "one-hot drafts, plain: p", "token 1: p"]


@pytest.mark.parametrize("part", ["exact", "sampled", "compared"])
def test_a_failure_is_an_exit_code_and_a_line(found: dict[str, list[Check]], part: str) -> None:
    found[part].append(Check("something", 0.3, 0.1, False))
    result = run("tiny")
    assert result.exit_code == 1
    assert "  FAIL something" in result.stdout
    assert result.stderr.splitlines()[-1] == (
        "error: 1 of 4 checks failed (something); do not serve with this speculation"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-model"], "no-such-model"),
        (["--speculative-config", "{"], "speculative_config"),
        (["--speculative-config", '{"method": "magic"}'], "magic"),
        (["tiny", "--temperature", "-1"], "temperature is -1"),
    ],
)
def test_mistakes_are_one_line(
    found: dict[str, list[Check]], arguments: list[str], reason: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
