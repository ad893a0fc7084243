"""Compile the GPU kernels of Llama-3-8B's steps for an H200, on a machine that has none.

    scripts/gpu_report [--layers N] [--weights bf16 int4 fp8] [--kv bf16 int8]
                       [--steps decode mixed verify] [--json FILE]

For every kernel: registers of a thread, bytes of shared memory of a thread block, spills. For every
step: what it takes beside weights and pool, whether the pool is updated in place, and the least it
must read and compute, with the time that an H200's data sheet allows for that: a limit, not a
measurement. Exits with 1 if a kernel spills, or a pool is copied.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the compiler wants no driver then
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxserve.planning.devices import find_gpu
from jaxserve.planning.figures import operations, size
from jaxserve.planning.h200 import why_not
from scripts.gpu_kernels.llama import LLAMA3_8B, WEIGHTS
from scripts.gpu_kernels.steps import STEPS, StepReport, compile_step

H200 = find_gpu("h200")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LLAMA3_8B["num_hidden_layers"])
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument(
        "--kv", nargs="+", default=["bf16", "int8"], choices=["bf16", "int8", "fp8"]
    )
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    problem = why_not()
    if problem is not None:
        sys.exit(f"nothing can be compiled for an H200 here: {problem}")
    reports = []
    for weights in options.weights:
        for kv in options.kv:
            for name in options.steps:
                report = compile_step(name, weights, kv, options.layers)
                reports.append(report)
                print("\n".join(lines(report)), flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps([as_json(report) for report in reports], indent=1) + "\n"
        )
    bad = [report for report in reports if report.spilling or not report.in_place]
    for report in bad:
        print(f"{title(report)}: {problems(report)}", file=sys.stderr)
    return 1 if bad else 0


def title(report: StepReport) -> str:
    bucket = STEPS[report.name].bucket.name
    return f"{bucket}, weights {report.weights}, KV {report.kv}, {report.layers} layers"


def problems(report: StepReport) -> str:
    found = [f"{kernel.name} spills {kernel.spills} bytes" for kernel in report.spilling]
    return "; ".join(found if report.in_place else [*found, "the pool is copied"])


def lines(report: StepReport) -> Iterable[str]:
    """The report of one step, for people."""
    work = report.work
    yield f"{title(report)} (compiled in {report.seconds:.0f} s)"
    yield f"  {'kernel':<28}  compiled  registers  shared memory  spills"
    for kernel, count in Counter(report.kernels).items():
        yield (
            f"  {kernel.name:<28}  {count:>8}  {kernel.registers:>9}  "
            f"{kernel.shared_memory:>13,}  {kernel.spills:>6}"
        )
    pool = "in place" if report.in_place else "COPIED"
    yield f"  temporaries {size(report.temporaries)}; pool {pool}"
    yield (
        f"  reads at least {size(work.weight_bytes)} of weights and {size(work.kv_bytes)} of KV, "
        f"computes {operations(work.operations)}op: no less than {1e3 * least(report):.2f} ms"
    )


def least(report: StepReport) -> float:
    """Seconds by the data sheet; products are of bfloat16 whatever the weights are kept in."""
    assert H200.bandwidth is not None
    return report.work.seconds(H200.bandwidth, H200.rates["bfloat16"])


def as_json(report: StepReport) -> dict[str, Any]:
    kernels = [
        {**asdict(kernel), "compiled": count} for kernel, count in Counter(report.kernels).items()
    ]
    return {**asdict(report), "kernels": kernels, "least_ms": 1e3 * least(report)}


if __name__ == "__main__":
    sys.exit(main())
