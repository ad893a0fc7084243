"""An evaluation as a table for people."""

from collections.abc import Mapping
from typing import Any

from jaxserve.eval.summary import FLIP_MARGIN

_COLUMNS = (
    ("perplexity", "perplexity", "{:.4f}"),
    ("nats per token", "nats_per_token", "{:.5f}"),
    ("bits per byte", "bits_per_byte", "{:.5f}"),
    ("weights (MB)", "weight_bytes", "{:.1f}"),
)


def report_text(report: Mapping[str, Any]) -> str:
    """What was run, then the numbers; a second column for the baseline where there is one."""
    baseline = report.get("baseline")
    lines = [f"{name:<10}{report[name]}" for name in ("model", "text", "served") if name in report]
    lines.append(
        f"{'scored':<10}{report['num_scored_tokens']} tokens, {report['num_scored_bytes']} bytes; "
        f"windows of {report['context']} tokens, {report['stride']} apart"
    )
    if baseline is not None:
        lines.append(_row("", "served", report["against"]))
    for title, key, form in _COLUMNS:
        values = [side[key] for side in (report, baseline) if side is not None]
        scaled = [value / 1e6 if key == "weight_bytes" else value for value in values]
        lines.append(_row(title, *map(form.format, scaled)))
    if baseline is not None:
        lines += _differences(report)
    lines.append(_row("peak memory, all of it (MB)", f"{report['peak_memory_bytes'] / 1e6:.0f}"))
    return "\n".join(lines)


def _differences(report: Mapping[str, Any]) -> list[str]:
    scored = report["num_scored_tokens"]
    widest = report["largest_flipped_margin"]
    return [
        _row("KL divergence, mean (nats)", f"{report['kl_mean']:.3e}"),
        _row("  99th percentile", f"{report['kl_p99']:.3e}"),
        _row("  largest", f"{report['kl_max']:.3e}"),
        _row("top-1 agreement", f"{100 * report['top1_agreement']:.2f} %"),
        _row("flips", f"{report['num_flips']} of {scored}"),
        _row(f"  where the lead was > {FLIP_MARGIN:g}", str(report["num_flips_above_margin"])),
        _row("  widest lead that was lost", "-" if widest is None else f"{widest:.3e}"),
    ]


def _row(title: str, *cells: str) -> str:
    return f"{title:<32}" + "".join(f"{cell:>16}" for cell in cells)
