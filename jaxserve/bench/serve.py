"""`jaxserve bench serve`: one load run, or a concurrent and a sequential one side by side."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.arrivals import Arrivals
from jaxserve.bench.load_client import Outcome, Target
from jaxserve.bench.load_generator import LoadResult, check_target, run_load
from jaxserve.bench.progress import progress_bar
from jaxserve.bench.serving_metrics import METRICS, Slos, summarise
from jaxserve.bench.workload import BenchRequest
from jaxserve.errors import EngineDeadError

_MAX_ERRORS_SHOWN = 3


@dataclass(frozen=True)
class ServeBench:
    """What to measure. `requests(k)` gives the prompts of the k-th run: other ones every time, so
    that no run profits from what the one before left in a prefix cache."""

    target: Target
    requests: Callable[[int], Sequence[BenchRequest]]
    arrivals: Arrivals
    max_concurrency: int | None
    num_warmups: int
    seed: int
    slos: Slos | None = None
    metrics: Sequence[str] = METRICS
    percentiles: Sequence[float] = (99.0,)
    compare_sequential: bool = False


async def run_serve_bench(bench: ServeBench) -> dict[str, Any]:
    """Run it; returns the fields of the JSON report.

    With compare_sequential the report has a second set of numbers under "sequential" (the same
    kind of requests, one after another) and "speedup", the ratio of their output throughputs.
    Raises EngineDeadError when the server fails a first, tiny request, or all of a run.
    """
    await check_target(bench.target)
    if bench.num_warmups:
        warmup = (list(bench.requests(-1)) * bench.num_warmups)[: bench.num_warmups]
        await _measure(bench, "warm-up", warmup, [0.0] * len(warmup), bench.max_concurrency)
    requests = bench.requests(0)
    times = bench.arrivals.send_times(len(requests), bench.seed)
    limit = bench.max_concurrency
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    report |= _numbers(bench, await _measure(bench, "measuring", requests, times, limit))
    if bench.compare_sequential:
        requests = bench.requests(1)
        result = await _measure(bench, "one after another", requests, [0.0] * len(requests), 1)
        report["sequential"] = _numbers(bench, result)
        report["speedup"] = report["output_throughput"] / report["sequential"]["output_throughput"]
    return report


async def _measure(
    bench: ServeBench,
    what: str,
    requests: Sequence[BenchRequest],
    send_times: Sequence[float],
    max_concurrency: int | None,
) -> LoadResult:
    with progress_bar(what, len(requests)) as advance:

        def on_done(_: Outcome) -> None:
            advance(1)

        return await run_load(bench.target, requests, send_times, max_concurrency, on_done)


def _numbers(bench: ServeBench, result: LoadResult) -> dict[str, Any]:
    errors = Counter(outcome.error for outcome in result.outcomes if outcome.error is not None)
    if errors.total() == len(result.outcomes):
        raise EngineDeadError(f"every request failed, most with: {errors.most_common(1)[0][0]}")
    numbers: dict[str, Any] = summarise(result, bench.slos, bench.metrics, bench.percentiles)
    numbers["errors"] = dict(errors.most_common(_MAX_ERRORS_SHOWN))
    counted = any(o.output_tokens is None for o in result.outcomes if o.error is None)
    numbers["tokens_counted_by"] = "chunks: the server reports no usage" if counted else "usage"
    return numbers
