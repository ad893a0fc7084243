"""`jaxserve bench throughput` and `latency`: the engine through the Python API, without HTTP."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.progress import progress_bar
from jaxserve.bench.sampling import BenchSampling
from jaxserve.bench.workload import BenchRequest
from jaxserve.llm import LLM

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)
Requests = Callable[[int], Sequence[BenchRequest]]  # the prompts of run k: other ones every time


def run_throughput(
    llm: LLM, requests: Requests, sampling: BenchSampling, *, compare_sequential: bool = False
) -> dict[str, Any]:
    """All requests at once, timed; with compare_sequential also one after another.

    Returns the fields of `vllm bench throughput`'s JSON, output_tokens_per_second, and for the
    comparison the same fields under "sequential" and "speedup", the ratio of the output rates.
    """
    _generate(llm, requests(-1)[:1], sampling)  # first use of the threads
    batch = requests(0)
    with progress_bar("all at once", len(batch)) as advance:
        report = _timed(llm, [batch], sampling, advance)
    if compare_sequential:
        single = [[request] for request in requests(1)]
        with progress_bar("one after another", len(single)) as advance:
            report["sequential"] = _timed(llm, single, sampling, advance)
        report["speedup"] = (
            report["output_tokens_per_second"] / report["sequential"]["output_tokens_per_second"]
        )
    return report


def run_latency(
    llm: LLM, requests: Requests, sampling: BenchSampling, *, warmups: int, iterations: int
) -> dict[str, Any]:
    """One batch, again and again: seconds from start to the last token of the batch."""
    latencies = []
    with progress_bar("batches", warmups + iterations) as advance:
        for run in range(warmups + iterations):
            batch = requests(run)
            start = time.perf_counter()
            _generate(llm, batch, sampling)
            if run >= warmups:
                latencies.append(time.perf_counter() - start)
            advance(1)
    values = np.percentile(np.asarray(latencies, np.float64), LATENCY_PERCENTILES)
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": dict(zip(map(str, LATENCY_PERCENTILES), map(float, values), strict=True)),
    }


def _timed(
    llm: LLM,
    batches: Sequence[Sequence[BenchRequest]],
    sampling: BenchSampling,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    inputs = outputs = count = 0
    start = time.perf_counter()
    for batch in batches:
        read, written = _generate(llm, batch, sampling)
        inputs, outputs, count = inputs + read, outputs + written, count + len(batch)
        advance(len(batch))
    elapsed = time.perf_counter() - start
    return {
        "elapsed_time": elapsed,
        "num_requests": count,
        "total_num_tokens": inputs + outputs,
        "total_output_tokens": outputs,
        "requests_per_second": count / elapsed,
        "tokens_per_second": (inputs + outputs) / elapsed,
        "output_tokens_per_second": outputs / elapsed,
    }


def _generate(llm: LLM, batch: Sequence[BenchRequest], sampling: BenchSampling) -> tuple[int, int]:
    """Run the batch; returns (prompt tokens, output tokens)."""
    params = [sampling.params(request.max_tokens) for request in batch]
    if batch[0].messages is not None:
        results = llm.chat([list(request.messages or ()) for request in batch], params, False)
    else:
        prompts = [
            {"prompt_token_ids": list(request.token_ids)}
            if request.token_ids is not None
            else {"prompt": request.text}
            for request in batch
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
    inputs = sum(len(result.prompt_token_ids) for result in results)
    return inputs, sum(len(out.token_ids) for result in results for out in result.outputs)
