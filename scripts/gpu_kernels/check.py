"""The GPU kernels on a GPU: right first, then how fast, beside others and what memory allows.

    scripts/gpu_check [--interpret] [--only right times] [--json FILE]

Takes under 8 minutes on an H200. Without a GPU it refuses, but for --interpret, which runs some
small correctness cases on a CPU. Exits with 1 if a kernel is wrong; then nothing is timed.
What it finds goes into results/gpu_check.json, of which scripts/gpu_kernels/table.py makes the
README's table.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_BUDGET = 440  # seconds; what has not begun by then is left out, and the report says so


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true", help="small cases, on a CPU")
    parser.add_argument("--only", nargs="+", default=["right", "times"], choices=["right", "times"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    if options.interpret:
        os.environ["JAX_PLATFORMS"] = "cpu"
        from jaxserve.core.threads import use_threads

        use_threads(None, interpreting=True)
    import jax

    problem = None if options.interpret else why_not(jax)
    if problem is not None:
        print(f"gpu_check cannot run: {problem}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": machine(jax), "right": [], "times": [], "left_out": []}
    if "right" in options.only and not right(report, interpret=options.interpret):
        return save(report, options.json, 1)
    if "times" in options.only and not options.interpret:
        from scripts.gpu_kernels.benchmark import run_all

        run_all(report, until=began + _BUDGET)
    report["seconds"] = round(time.monotonic() - began)
    return save(report, options.json or (None if options.interpret else DEFAULT), 0)


DEFAULT = ROOT / "results" / "gpu_check.json"


def why_not(jax: Any) -> str | None:
    """Why the kernels cannot run here, and what would help; None if they can."""
    from jaxserve.core.backends import choose_backend

    try:
        choose_backend("mosaic_gpu", jax.devices()[0])
    except NotImplementedError as error:
        return (
            f"{error}. Run it on an NVIDIA H200 or H100 with jax[cuda13] installed; --interpret "
            "runs small correctness cases on a CPU, and scripts/gpu_report compiles every kernel"
        )
    return None


def machine(jax: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    return {"device": device.device_kind, "jax": jax.__version__, "time": time.strftime("%F %H:%M")}


def right(report: dict[str, Any], *, interpret: bool) -> bool:
    """Run all checks, say what is wrong, and whether nothing is."""
    from scripts.gpu_kernels.checks import all_checks

    wrong = 0
    for check in all_checks(interpret=interpret):
        error = None if check.why else check.error
        report["right"].append(
            {"op": check.op, "case": check.case, "error": error, "bound": check.bound}
        )
        verdict = "right" if check.is_right else "WRONG"
        wrong += not check.is_right
        found = check.why or f"{check.error:.2e} of {check.bound:.0e}"
        print(f"{verdict}  {check.op}, {check.case}: {found}", flush=True)
    print(f"{len(report['right'])} cases, {wrong} wrong", flush=True)
    return wrong == 0


def save(report: dict[str, Any], path: Path | None, code: int) -> int:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
