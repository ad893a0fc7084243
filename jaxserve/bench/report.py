"""A benchmark's report as text for people and as a JSON file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequestError

_SERVE_ROWS = (
    ("requests completed", "completed", "d"),
    ("requests failed", "failed", "d"),
    ("duration (s)", "duration", ".2f"),
    ("input tokens", "total_input_tokens", "d"),
    ("output tokens", "total_output_tokens", "d"),
    ("request throughput (1/s)", "request_throughput", ".3f"),
    ("request goodput (1/s)", "request_goodput", ".3f"),
    ("output throughput (tok/s)", "output_throughput", ".2f"),
    ("total throughput (tok/s)", "total_token_throughput", ".2f"),
    ("peak output (tok in one s)", "max_output_tokens_per_s", ".1f"),
    ("peak requests in flight", "max_concurrent_requests", "d"),
)
_THROUGHPUT_ROWS = (
    ("requests", "num_requests", "d"),
    ("elapsed (s)", "elapsed_time", ".2f"),
    ("tokens in and out", "total_num_tokens", "d"),
    ("requests/s", "requests_per_second", ".3f"),
    ("tokens/s, in and out", "tokens_per_second", ".2f"),
    ("output tokens/s", "output_tokens_per_second", ".2f"),
)
_METRIC_NAMES = {
    "ttft": "TTFT  time to first token",
    "tpot": "TPOT  time per output token",
    "itl": "ITL   time between tokens",
    "e2el": "E2EL  whole request",
}


def serve_text(report: Mapping[str, Any]) -> str:
    """The report of `bench serve`, with the sequential run beside it when there is one."""
    runs = [report, report["sequential"]] if "sequential" in report else [report]
    heads = ("", "concurrent", "sequential") if len(runs) > 1 else None
    lines = [*_statement(report), *_rows(runs, _SERVE_ROWS, heads)]
    for name, title in _METRIC_NAMES.items():
        suffix = f"_{name}_ms"
        found = [key for key in report if key.endswith(suffix)]
        if found:
            rows = [(f"  {key.removesuffix(suffix)}", key, ".2f") for key in found]
            lines += [f"{title} (ms)", *_rows(runs, rows, None)]
    lines += [f"  error, {times} times: {text}" for text, times in report["errors"].items()]
    lines.append(f"output tokens counted by {report['tokens_counted_by']}")
    return "\n".join(lines + _speedup(report))


def throughput_text(report: Mapping[str, Any]) -> str:
    """The report of `bench throughput`."""
    runs = [report, report["sequential"]] if "sequential" in report else [report]
    heads = ("", "all at once", "one by one") if len(runs) > 1 else None
    return "\n".join(
        [*_statement(report), *_rows(runs, _THROUGHPUT_ROWS, heads), *_speedup(report)]
    )


def latency_text(report: Mapping[str, Any]) -> str:
    """The report of `bench latency`."""
    lines = [*_statement(report), f"{'average (s)':<28}{report['avg_latency']:>14.3f}"]
    for percentile, value in report["percentiles"].items():
        lines.append(f"{f'p{percentile} (s)':<28}{value:>14.3f}")
    return "\n".join(lines)


def save_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the report; raises InvalidRequestError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}") from None


def _statement(report: Mapping[str, Any]) -> list[str]:
    """What was measured: model, prompts, arrivals, sampling."""
    names = ("model", "url", "workload", "arrivals", "sampling")
    return [f"{name:<10}{report[name]}" for name in names if name in report]


def _rows(
    runs: Sequence[Mapping[str, Any]],
    rows: Sequence[tuple[str, str, str]],
    heads: Sequence[str] | None,
) -> list[str]:
    lines = []
    if heads is not None:
        lines.append(f"{heads[0]:<28}" + "".join(f"{head:>14}" for head in heads[1:]))
    for title, key, form in rows:
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = ["-" if value is None else format(value, form) for value in values]
            lines.append(f"{title:<28}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _speedup(report: Mapping[str, Any]) -> list[str]:
    if "speedup" not in report:
        return []
    return [f"speedup in output tokens/s over one after another: {report['speedup']:.2f}x"]
