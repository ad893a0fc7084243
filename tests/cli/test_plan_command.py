"""`jaxserve plan`: text for people, JSON for scripts, errors in a line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.cli.main import app
from jaxserve.planning import plan_model
from jaxserve.planning.devices import Device
from tests.support.tiny_engine import tiny_config


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(tiny_config()))
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_plain_when_piped(model: str) -> None:
    code, out, _ = run(model, "--device", "a100", "--max-batch-rows", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == (
        "tiny (config.json alone, weights drawn at random), bfloat16, KV cache in bfloat16"
    )
    assert lines[1].startswith("NVIDIA A100 80GB SXM: 80.00 GB of memory, 2.04 TB/s, 312.00 Top/s")
    assert (
        "  a token  128 bytes  2 x 2 layers x 2 heads x 8 x 2 bytes" in " ".join(out.split("  "))
        or "2 x 2 layers x 2 heads x 8 x 2 bytes" in out
    )
    assert "for a100 their size is an estimate" in out
    assert all(ord(char) < 128 for char in out)


def test_tables_on_a_terminal(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(model, "--device", "l4")
    assert "\x1b[" in out
    assert "Largest batch that the memory holds" in out


def test_json_for_scripts(model: str) -> None:
    code, out, _ = run(model, "--device", "h100", "--json", "--kv-cache-dtype", "int8")
    report = json.loads(out)
    assert code == 0
    assert report["kv_dtype"] == "int8"
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * (8 + 4)
    assert report["memory"]["usable"] == 72_000_000_000
    assert report["memory"]["temporaries_are_exact"] is False


def test_this_machine_is_measured(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", "this CPU", "a test", 10**10, 2e9, {"float32": 1e9})
    monkeypatch.setattr(plan_model, "measured_cpu", lambda: cpu)
    code, out, err = run(model, "--max-batch-rows", "2", "--max-batch-tokens", "16")
    assert code == 0
    assert "compiling mixed2+16 for this CPU ..." in err
    assert "this CPU: 10.00 GB of memory, 2.00 GB/s, 1.00 Gop/s in float32 (a test)" in out
    assert "compiled for this machine" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "error: device is 'tpu'; choose h200, h100, a100, l4, cpu"),
        (["--device", "h100", "--gpu-memory-utilization", "1.5"],
         "error: gpu_memory_utilization is 1.5; give a number above 0, at most 1"),
        (["--device", "h100", "--kv-memory", "5K"], "error: kv_memory is 5120 bytes"),
        (["--device", "h100", "--dtype", "float64"],
         "error: dtype is 'float64'; choose auto, float32 or bfloat16"),
    ],
)  # fmt: skip
def test_errors_are_a_line(model: str, arguments: list[str], message: str) -> None:
    if "5K" in arguments:
        arguments = [*arguments, "--page-size", "128"]
    code, out, err = run(model, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    code, _, err = run(str(tmp_path / "nothing"), "--device", "h100")
    assert code == 1
    assert "is no file or folder here" in err
