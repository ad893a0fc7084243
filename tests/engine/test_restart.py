"""Saved runs go on in another process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def process(what: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.saved_runs", what, str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_saved_runs_go_on_in_another_process_with_the_same_tokens(tmp_path: Path) -> None:
    whole = process("save", tmp_path)
    loaded = process("load", tmp_path)
    assert loaded.keys() == whole.keys()
    for name, (inherited, cached, tokens) in loaded.items():
        assert tokens == whole[name], name
        assert 7 <= inherited < 80, f"{name} had ended when it was saved"
        assert cached >= 20, f"{name} was computed again"
