"""What one step costs in the engine: greedy against sampled, and the host's part of it.

Usage: python scripts/bench_step.py [--model smollm2] [--rows 16] [--tokens 48] [--rounds 4]

Both kinds run in the same engine in turns, `rows` requests at a time; printed are medians of the
decode steps that held all rows. Sampled means temperature 0.8, top_k 50, top_p 0.95.
"""

import argparse
import os
import statistics

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.request import Request
from jaxserve.loading.load import load_model
from jaxserve.loading.model_cache import home
from jaxserve.sampling_params import SamplingParams

KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
PROMPT_TOKENS = 128
MOST_SAMPLED_COST = 1.15


def run(engine: Engine, kind: str, rows: int, tokens: int, seed: int) -> list[StepStats]:
    """Decode steps with all rows in them."""
    stats: list[StepStats] = []
    engine.observe(stats.append)
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **KINDS[kind])
    for row in range(rows):
        prompt = tuple(rng.integers(10, 10_000, PROMPT_TOKENS).tolist())
        engine.add(Request(f"{kind}-{row}", prompt, params, max_tokens=tokens, seed=row))
    while engine.has_work:
        engine.step()
    return [s for s in stats if s.step_tokens == rows and s.bucket.startswith("decode")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    use_compile_cache(home() / "compiled")
    engine = Engine(load_model(args.model), EngineConfig(max_batch_rows=args.rows))
    engine.warm_up()
    ratios: list[float] = []
    steps: dict[str, list[StepStats]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        medians = {}
        for kind in KINDS:
            found = run(engine, kind, args.rows, args.tokens, number)
            medians[kind] = statistics.median(s.device_seconds for s in found)
            steps[kind] += found
        ratios.append(medians["sampled"] / medians["greedy"])
    print(f"{args.model}, decode steps of {args.rows} rows, prompts of {PROMPT_TOKENS} tokens")
    for kind, found in steps.items():
        device = statistics.median(s.device_seconds for s in found) * 1e3
        host = statistics.median(s.host_seconds for s in found) * 1e3
        print(f"{kind:8} device {device:7.1f} ms   host {host:5.2f} ms = {host / device:.1%} of it")
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    verdict = "reached" if middle <= MOST_SAMPLED_COST else "MISSED"
    print(
        f"sampled / greedy, min / median / max over {args.rounds} rounds: "
        f"{low:.3f} / {middle:.3f} / {high:.3f}   <= {MOST_SAMPLED_COST} {verdict}"
    )
    print(f"compiles while serving: {engine.runner.late_compiles}")


if __name__ == "__main__":
    main()
