"""The README's table of GPU results, made from results/gpu_check.json.

    python scripts/gpu_kernels/table.py [FILE]

Prints Markdown. Without a file it says that no GPU was at hand: nothing is ever estimated.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).resolve().parents[2] / "results" / "gpu_check.json"
NONE = "No GPU was at hand: `scripts/gpu_check` has not run, and there are no timings."
# (case, what is judged, how it is written, the target)
TARGETS = (
    ("decode attention, batch 64, 8192 tokens, KV bf16", "share_of_copy", "of copy bandwidth", 0.8),
    ("gate_up, 1 rows, int4", "share_of_copy", "of copy bandwidth", 0.7),
    ("gate_up, 16 rows, int4", "share_of_copy", "of copy bandwidth", 0.7),
    ("prefill attention, 8192 tokens, KV bf16", "teraflops", "TFLOP/s", 500),
    ("decode step, batch 1, bf16", "share_of_roofline", "of its roofline", 0.8),
    ("decode step, batch 64, bf16", "share_of_roofline", "of its roofline", 0.8),
    ("decode step, batch 1, int4", "share_of_roofline", "of its roofline", 0.8),
    ("decode step, batch 64, int4", "share_of_roofline", "of its roofline", 0.8),
)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    print(table(json.loads(path.read_text())) if path.exists() else NONE)


def table(report: dict[str, Any]) -> str:
    """Targets first, then every timing, then what was left out and why."""
    machine = report["machine"]
    bandwidth = machine.get("copy_bandwidth")
    if bandwidth is None:
        return NONE
    times = {entry["case"]: entry for entry in report["times"]}
    parts = [
        f"{machine['device']}, jax {machine['jax']}, {machine['time']}; copy "
        f"{bandwidth / 1e12:.2f} TB/s; {len(report['right'])} cases right.",
        "",
        *rows(("target", "wanted", "measured", ""), _verdicts(times)),
        "",
        *rows(("case", "us", "share of copy or roofline", "TFLOP/s"), map(_line, times.values())),
    ]
    if report["left_out"]:
        parts += ["", *(f"Left out: {one['case']} ({one['why']})." for one in report["left_out"])]
    return "\n".join(parts)


def _verdicts(times: dict[str, Any]) -> Iterable[Sequence[str]]:
    for case, field, unit, wanted in TARGETS:
        found = times.get(case, {}).get(field)
        yield (
            case,
            f"{_number(wanted)} {unit}",
            "not measured" if found is None else f"{_number(found)}",
            "" if found is None else "met" if found >= wanted else "missed",
        )


def _line(entry: dict[str, Any]) -> Sequence[str]:
    share = entry.get("share_of_copy", entry.get("share_of_roofline"))
    rate = entry.get("teraflops")
    return (
        entry["case"],
        f"{entry['us']:,.1f}",
        "" if share is None else _number(share),
        "" if rate is None else _number(max(rate, 2)),
    )


def _number(value: float) -> str:
    """A share in percent, a rate as it is."""
    return f"{100 * value:.0f} %" if value < 2 else f"{value:,.0f}"


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


if __name__ == "__main__":
    main()
