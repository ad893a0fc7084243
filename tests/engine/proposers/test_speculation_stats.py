"""Counters of speculation, and that all of this runs without the device."""

import subprocess
import sys
from pathlib import Path

from jaxserve.engine.proposers.stats import SpeculationStats

ROOT = Path(__file__).resolve().parents[3]


def test_counters():
    stats = SpeculationStats()
    assert stats.tokens_per_step == 1.0
    stats.record(0, 0)
    stats.record(3, 2)
    stats.record(1, 1)
    before = stats.copy()
    stats.record(4, 4)
    assert stats == SpeculationStats(3, 8, 7, 11, 4, [3, 2, 1, 1])
    assert stats.since(before) == SpeculationStats(1, 4, 4, 5, 1, [1, 1, 1, 1])
    assert before == SpeculationStats(2, 4, 3, 6, 3, [2, 1, 0])
    assert stats.tokens_per_step == 11 / 4


def test_no_jax():
    folder = ROOT / "jaxserve" / "engine" / "proposers"
    names = ["ngram", "suffix", "lookahead", "control", "stats", "host_proposers"]
    assert all((folder / f"{name}.py").exists() for name in names)
    code = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module('jaxserve.engine.proposers.' + name)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
