"""The GPU scripts where there is no GPU: they refuse, and what they would run there is sound."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.planning.h200 import why_not
from scripts.gpu_kernels import table, timed, tune
from scripts.gpu_kernels.checks import Check, all_checks
from scripts.gpu_kernels.llama import LINEARS, Row, described, kv_token_bytes, step_work
from scripts.gpu_kernels.peers import decode_peers, prefill_peers
from scripts.gpu_kernels.steps import STEPS, compile_step, decode_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["check", "tune"])
def test_refused_without_a_gpu(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, f"scripts/gpu_kernels/{name}.py", "--json", tmp_path / "out.json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "wants an NVIDIA Hopper GPU, and JAX runs on a CPU" in done.stderr
    assert "--interpret" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_checks_find_the_kernels_right_when_interpreted() -> None:
    checks = list(all_checks(interpret=True))
    assert {check.op for check in checks} == {
        "decode attention", "prefill attention", "latent attention", "kv write", "quantised matmul",
    }  # fmt: skip
    for check in checks:
        assert check.is_right, check


def test_a_number_that_is_none_is_not_right() -> None:
    assert Check("op", "case", 0.01, 0.02).is_right
    assert not Check("op", "case", 0.03, 0.02).is_right
    assert not Check("op", "case", float("nan"), 0.02, "RuntimeError: why").is_right


@cache
def works() -> dict[str, timed.Timed]:
    return {
        "decode": timed.decode(2, 100, "bf16", cache_bytes=1 << 20),
        "decode int8": timed.decode(1, 64, "int8", cache_bytes=1),
        "prefill": timed.prefill(130, "bf16"),
        "int4": timed.product("out", (256, 512), 3, "int4", cache_bytes=1 << 18),
        "fp8": timed.product("out", (256, 512), 17, "fp8", cache_bytes=1),
        "bf16": timed.product("out", (256, 512), 17, "bf16", cache_bytes=1),
        "copy": timed.copy(1),
    }


def test_what_is_timed_is_traced_on_any_machine() -> None:
    """Its shapes and types are those that the kernels take; compiling them is tested elsewhere."""
    for name, work in works().items():
        out = jax.tree.leaves(jax.eval_shape(work.function, *work.arguments))
        assert all(leaf.dtype == jnp.bfloat16 for leaf in out), name
        assert len(out) == (work.calls if work.op == "matmul" else 1)
        assert work.read_bytes > 0


def test_bytes_of_what_is_timed() -> None:
    made = works()
    decode = made["decode"]
    assert decode.calls == -(-(1 << 20) // (2 * 100 * 4096))
    assert decode.read_bytes == 2 * 100 * 2 * 8 * 128 * 2
    assert made["decode int8"].read_bytes == 64 * 2 * 8 * (128 + 4)
    assert made["int4"].calls > 1
    packed = 256 * 512 // 2 + 2 * 4 * 256 * 512 // 32  # codes; scales, and zeros of some type
    assert 0.6 * packed < made["int4"].read_bytes - 2 * 3 * 768 <= packed


def test_peers_are_named() -> None:
    assert [*decode_peers(1, 64)][:3] == [*prefill_peers(64)][:3]
    assert {"cuDNN by jax.nn", "torch SDPA"} < {*decode_peers(1, 64)}


def test_a_step_to_run_is_traced_on_any_machine() -> None:
    step, arguments = decode_step(described("int4", 1), 2, 100)
    tokens, pool = jax.eval_shape(step, *arguments)
    assert tokens.shape == (2,)
    assert jax.tree.structure(pool) == jax.tree.structure(arguments[1])


def test_the_least_work_of_a_step() -> None:
    """Two operations for each weight of the layers and of the logits, and for each number of a key
    and of a value that a query sees; every byte once."""
    model = described("bf16", 2)
    layer = sum(rows * inputs for rows, inputs in LINEARS.values())
    work = step_work(model, "int8", [Row(1, 100), Row(3, 10)], sampled=2)
    norms = 5 * 4096
    assert work.weight_bytes == 2 * (2 * layer + 128256 * 4096 + norms)
    assert work.kv_bytes == 110 * kv_token_bytes("int8", 2) == 110 * 2 * 2 * 8 * 132
    pairs = 100 + (10 + 9 + 8)
    assert work.operations == 4 * 2 * 2 * layer + 2 * 2 * 128256 * 4096 + pairs * 2 * 4 * 4096
    assert work.seconds(1.0, 1e30) == work.read_bytes
    assert work.seconds(1e30, 1.0) == work.operations


@pytest.mark.sm90a
@pytest.mark.parametrize(
    ("name", "weights", "kv"),
    [
        ("decode", "bf16", "int8"),
        ("mixed", "int4", "bf16"),
        ("verify", "fp8", "bf16"),
        ("mixed", "fp8", "int8"),
    ],
)
def test_whole_steps_compile_for_hopper(name: str, weights: str, kv: str) -> None:
    """Without spills, without a copy of the pool, and all layers share their kernels."""
    assert why_not() is None, why_not()
    report = compile_step(name, weights, kv, layers=2)
    assert not report.spilling
    assert report.in_place
    attention = ["decode_attention", "prefill_attention"][: 1 + (name == "mixed")]
    names = [kernel.name for kernel in report.kernels]
    for kernel in ("kv_write", *attention):
        assert names.count(kernel) == 1, names
    assert len(names) > 1 + len(attention) or weights == "bf16"
    assert report.temporaries < 1 << 30
    assert STEPS[name].bucket.num_tokens >= STEPS[name].sampled - 8


@dataclass(frozen=True)
class Tiles:
    keys: int
    stages: int
    reason: str = ""

    def __post_init__(self) -> None:
        if self.keys == 13:
            raise ValueError("keys is 13")


def test_a_search_tries_at_most_24_and_keeps_what_is_faster() -> None:
    axes = {"keys": (13, *range(64, 74)), "stages": tuple(range(2, 12))}
    tried: list[Any] = []

    def seconds(tiles: Tiles) -> float:
        tried.append(tiles)
        if tiles.stages == 5:
            raise RuntimeError("too much shared memory")
        return 1.0 / tiles.stages

    start = Tiles(64, 3)
    best = tune.Search("op", "shape", start, axes, seconds).run()
    assert tried[0] == start
    assert len(tried) == len(set(tried)) == tune.MOST
    assert best["tiles"]["stages"] == max(tiles.stages for tiles in tried)
    assert best["tried"] == sum(tiles.stages != 5 for tiles in tried)
    even = tune.Search("op", "shape", start, axes, lambda tiles: 1.0).run()
    assert even["tiles"]["stages"] == 3
    broken = tune.Search("op", "shape", start, {}, lambda tiles: tiles.missing).run()
    assert "why_not" in broken


def test_the_table_is_made_of_what_was_measured(tmp_path: Path) -> None:
    assert "No GPU was at hand" in table.table({"machine": {}, "right": [], "times": []})
    case = table.TARGETS[0][0]
    report = {
        "machine": {
            "device": "NVIDIA H200",
            "jax": "0.11.2",
            "time": "now",
            "copy_bandwidth": 4e12,
        },
        "right": [{}] * 3,
        "times": [
            {"case": case, "us": 1234.5, "share_of_copy": 0.815, "teraflops": 41.0},
            {"case": "decode step, batch 1, bf16", "us": 10.0, "share_of_roofline": 0.5},
            {"case": f"{case}, by torch SDPA", "us": 20.0, "peer": True},
        ],
        "left_out": [{"case": "x", "why": "no torch"}],
    }
    text = table.table(report)
    assert f"| {case} | 80 % of copy bandwidth | 82 % | met |" in text
    assert "| decode step, batch 1, bf16 | 80 % of its roofline | 50 % | missed |" in text
    assert "| not measured |" in text
    assert f"| {case} | 1,234.5 | 82 % | 41 |" in text
    assert "Left out: x (no torch)." in text
    path = tmp_path / "none.json"
    done = subprocess.run(
        [sys.executable, "scripts/gpu_kernels/table.py", path],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("No GPU was at hand")
    path.write_text(json.dumps(report))
    done = subprocess.run(
        [sys.executable, "scripts/gpu_kernels/table.py", path],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == text + "\n"
