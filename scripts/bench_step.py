"""What one decode step costs in the engine: greedy against sampled, and the host's part of it.

Usage: python scripts/bench_step.py [--model smollm2] [--rows 16] [--steps 100]

First the engine serves `rows` requests, for the host's time per step. Then the same decode step is
dispatched again and again, greedy and sampled in turns, so that a noisy machine disturbs both
alike; printed is the median of the paired ratios. Sampled: temperature 0.8, top_k 50, top_p 0.95.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core.backends import weight_layout
from jaxserve.core.buckets import pick_bucket
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.request import Request
from jaxserve.loading.load import load_model
from jaxserve.loading.model_cache import home
from jaxserve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.95, max_tokens=64, ignore_eos=True, seed=1
)
PROMPT_TOKENS = 128
MOST_SAMPLED_COST = 1.15


def add_requests(engine: Engine, params: SamplingParams, rows: int) -> None:
    rng = np.random.default_rng(0)
    for row in range(rows):
        prompt = tuple(rng.integers(10, 10_000, PROMPT_TOKENS).tolist())
        engine.add(Request(f"row-{row}", prompt, params, max_tokens=64, seed=row))


def serve(engine: Engine, rows: int) -> list[StepStats]:
    """Serve to the end; the decode steps that had all rows in them."""
    stats: list[StepStats] = []
    engine.observe(stats.append)
    add_requests(engine, SAMPLED, rows)
    while engine.has_work:
        engine.step()
    return [s for s in stats if s.step_tokens == rows and s.bucket.startswith("decode")]


def decode_step(engine: Engine, params: SamplingParams, rows: int) -> Callable[[], float]:
    """A function that runs the decode step of `rows` such requests and returns its seconds."""
    add_requests(engine, params, rows)
    plan = engine.scheduler.schedule()
    while len(plan.decode) < rows:
        ran = (*plan.decode, *plan.prefill)
        engine.scheduler.commit(plan, {item.request.request_id: [7] for item in ran})
        plan = engine.scheduler.schedule()
    bucket = pick_bucket(engine.bucket_table, rows, 0, 0)
    shape = engine.shape
    batch = build_batch(
        plan,
        bucket,
        num_groups=shape.num_groups,
        pages_per_row=shape.pages_per_row,
        page_size=shape.page_size,
    )
    sampling = build_sampling(plan, bucket)
    for row in range(rows):
        engine.abort(f"row-{row}")

    def run() -> float:
        start = time.perf_counter()
        engine.runner.dispatch(bucket, batch, sampling).result()
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    use_compile_cache(home() / "compiled")
    model = load_model(args.model, weight_layout=weight_layout("auto"))
    engine = Engine(model, EngineConfig(max_batch_rows=args.rows, prefix_cache=False))
    engine.warm_up()
    served = serve(engine, args.rows)
    host = statistics.median(s.host_seconds for s in served)
    device = statistics.median(s.device_seconds for s in served)
    greedy, sampled = (decode_step(engine, kind, args.rows) for kind in (GREEDY, SAMPLED))
    pairs = [(greedy(), sampled()) for _ in range(args.steps)]
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{args.model}, decode steps of {args.rows} rows, prompts of {PROMPT_TOKENS} tokens")
    print(f"served: device {device * 1e3:.1f} ms, host {host * 1e3:.2f} ms ({host / device:.1%})")
    print(f"greedy  {statistics.median(a for a, _ in pairs) * 1e3:.1f} ms")
    print(f"sampled {statistics.median(b for _, b in pairs) * 1e3:.1f} ms")
    verdict = "reached" if ratio <= MOST_SAMPLED_COST else "MISSED"
    print(
        f"sampled / greedy, median of {args.steps} pairs: {ratio:.3f}"
        f"   <= {MOST_SAMPLED_COST} {verdict}"
    )
    print(f"compiles while serving: {engine.runner.late_compiles}")


if __name__ == "__main__":
    main()
