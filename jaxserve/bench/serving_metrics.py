"""What a load run says: latencies per request and token, throughput, goodput.

Names and definitions are those of `vllm bench serve`:
  TTFT  from sending to the first token;   E2EL  from sending to the last one
  TPOT  (E2EL - TTFT) / (output tokens - 1), one value per request
  ITL   time between tokens, one value per token after the first chunk
A chunk may carry several tokens. Its share of the gap before it goes to each of them, by the
server's own count where the chunk tells it, else by the request's mean tokens per chunk (from
`usage`): counting chunks would overstate ITL by that factor. Failed requests are counted, and are
in no other number.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.load_client import Outcome
from jaxserve.bench.load_generator import LoadResult
from jaxserve.errors import InvalidRequestError

METRICS = ("ttft", "tpot", "itl", "e2el")
_SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class RequestTimes:
    """One successful request, in milliseconds. None where it has too few tokens to tell."""

    ttft: float | None
    tpot: float | None
    e2el: float
    itl: list[float]


def request_times(outcome: Outcome) -> RequestTimes:
    """Latencies of a successful request."""
    e2el = 1e3 * (outcome.finished - outcome.started)
    if outcome.first_token is None:
        return RequestTimes(None, None, e2el, [])
    ttft = 1e3 * (outcome.first_token - outcome.started)
    after_first = outcome.num_output_tokens - 1
    tpot = (e2el - ttft) / after_first if after_first > 0 else None
    return RequestTimes(ttft, tpot, e2el, token_gaps(outcome))


def token_gaps(outcome: Outcome) -> list[float]:
    """Milliseconds between tokens, one value per token after the first chunk."""
    mean_tokens = outcome.num_output_tokens / len(outcome.chunks)
    known = all(chunk.tokens is not None for chunk in outcome.chunks)
    chunks = [chunk for chunk in outcome.chunks if chunk.tokens != 0]  # 0: text held back before
    gaps: list[float] = []
    owed = 0.0  # tokens promised by the mean but not yet written down
    for before, chunk in itertools.pairwise(chunks):
        tokens = float(chunk.tokens or 0) if known else mean_tokens
        gap = 1e3 * (chunk.time - before.time) / max(tokens, 1e-9)
        owed += tokens
        copies = round(owed)
        owed -= copies
        gaps.extend([gap] * copies)
    return gaps


@dataclass(frozen=True)
class Slos:
    """Goodput counts requests that keep all of these limits (metric, milliseconds)."""

    limits: tuple[tuple[str, float], ...]

    def met_by(self, times: RequestTimes) -> bool:
        values = {"ttft": times.ttft, "tpot": times.tpot, "e2el": times.e2el}
        return all((values[name] or 0.0) <= limit for name, limit in self.limits)


def parse_slos(texts: Sequence[str]) -> Slos | None:
    """`ttft:200 tpot:50` -> Slos; commas and spaces separate. Raises InvalidRequestError."""
    limits = []
    for text in " ".join(texts).replace(",", " ").split():
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in _SLO_METRICS or not limit > 0:
            raise InvalidRequestError(
                f"goodput limit {text[:40]!r}; write metric:milliseconds with a metric of "
                f"{', '.join(_SLO_METRICS)}, such as ttft:200 tpot:50",
                "goodput",
            )
        limits.append((name, limit))
    return Slos(tuple(limits)) if limits else None


def summarise(
    result: LoadResult,
    slos: Slos | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, float | int | None]:
    """All numbers of a run, with the field names of `vllm bench serve`'s JSON."""
    good = [outcome for outcome in result.outcomes if outcome.error is None]
    times = [request_times(outcome) for outcome in good]
    duration = result.duration
    inputs = sum(outcome.prompt_tokens or 0 for outcome in good)
    outputs = sum(outcome.num_output_tokens for outcome in good)
    summary: dict[str, float | int | None] = {
        "completed": len(good),
        "failed": len(result.outcomes) - len(good),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": _peak_tokens_per_second(good),
        "max_concurrent_requests": _peak_concurrency(result.outcomes),
    }
    if slos is not None:
        summary["request_goodput"] = sum(map(slos.met_by, times)) / duration
    values = {
        "ttft": [t.ttft for t in times if t.ttft is not None],
        "tpot": [t.tpot for t in times if t.tpot is not None],
        "itl": [gap for t in times for gap in t.itl],
        "e2el": [t.e2el for t in times],
    }
    for name in metrics:
        summary |= _statistics(name, values[name], percentiles)
    return summary


def _statistics(
    name: str, values: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | int | None]:
    keys = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    if not values:
        return {f"{key}_{name}_ms": None for key in keys}
    array = np.asarray(values, np.float64)
    numbers = [array.mean(), np.median(array), array.std(), *np.percentile(array, percentiles)]
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, numbers, strict=True)}


def _peak_tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """The most tokens that arrived within one second of the run's clock."""
    seconds: dict[int, float] = {}
    for outcome in outcomes:
        share = outcome.num_output_tokens / len(outcome.chunks) if outcome.chunks else 0.0
        for chunk in outcome.chunks:
            tokens = share if chunk.tokens is None else chunk.tokens
            seconds[int(chunk.time)] = seconds.get(int(chunk.time), 0.0) + tokens
    return max(seconds.values(), default=0.0)


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were in flight at one time."""
    changes = sorted(
        change
        for outcome in outcomes
        if outcome.finished > outcome.started
        for change in ((outcome.started, 1), (outcome.finished, -1))
    )
    running = peak = 0
    for _, step in changes:
        running += step
        peak = max(peak, running)
    return peak
