"""Time the sampler alone: each kind of batch against the greedy one, as minima over many calls.

    python scripts/bench_sampler.py [--rows 16] [--vocab 49152] [--repeats 100]

Logits are random normal numbers (spread 3 like a small model's, and nearly flat for the worst
case of top_p). Kinds take turns, so that other load on the machine meets all of them.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.core.step_batch import MAX_SUPPRESS_IDS, SamplingBatch
from jaxserve.sampling import make_state, sample
from jaxserve.sampling_params import MAX_LOGIT_BIAS


def greedy_batch(rows: int) -> SamplingBatch:
    """Every setting at its neutral value."""
    return SamplingBatch(
        active=np.ones(rows, bool),
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition_penalty=np.ones(rows, np.float32),
        presence_penalty=np.zeros(rows, np.float32),
        frequency_penalty=np.zeros(rows, np.float32),
        bias_ids=np.full((rows, MAX_LOGIT_BIAS), -1, np.int32),
        bias_values=np.zeros((rows, MAX_LOGIT_BIAS), np.float32),
        suppress_ids=np.full((rows, MAX_SUPPRESS_IDS), -1, np.int32),
        suppress_until=np.zeros(rows, np.int32),
        seed=np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2),
        choice=np.zeros(rows, np.int32),
        positions=np.full((rows, 1), 100, np.int32),
        slot=np.arange(1, rows + 1, dtype=np.int32),
        num_logprobs=np.full(rows, -1, np.int32),
    )


def kinds(rows: int) -> dict[str, tuple[str, SamplingBatch]]:
    """Name -> (which logits, batch)."""
    greedy = greedy_batch(rows)

    def full(value: float, dtype: type = np.float32) -> np.ndarray:
        return np.full(rows, value, dtype)

    warm = replace(greedy, temperature=full(0.8))
    half = np.where(np.arange(rows) % 2 == 0, 0.8, 0.0).astype(np.float32)
    bias_ids = np.tile(np.arange(MAX_LOGIT_BIAS, dtype=np.int32), (rows, 1))
    filtered = replace(warm, top_k=full(50, np.int32), top_p=full(0.95))
    return {
        "greedy": ("peaked", greedy),
        "temperature 0.8, top_k 50, top_p 0.95": ("peaked", filtered),
        "the same, every other row greedy": ("peaked", replace(filtered, temperature=half)),
        "temperature 0.8": ("peaked", warm),
        "temperature 0.8, top_p 0.95": ("peaked", replace(warm, top_p=full(0.95))),
        "temperature 0.8, min_p 0.05": ("peaked", replace(warm, min_p=full(0.05))),
        "flat logits, top_p 0.9": ("flat", replace(warm, top_p=full(0.9))),
        "flat logits, top_p 0.1": ("flat", replace(warm, top_p=full(0.1))),
        "top_k 1000, top_p 0.95 (searched)": (
            "peaked",
            replace(warm, top_k=full(1000, np.int32), top_p=full(0.95)),
        ),
        "greedy + penalties": ("peaked", replace(greedy, repetition_penalty=full(1.1))),
        "greedy + 512 biases": ("peaked", replace(greedy, bias_ids=bias_ids)),
        "greedy + 20 logprobs": ("peaked", replace(greedy, num_logprobs=full(20, np.int32))),
    }


def timed(step: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(step(*args))
    return (time.perf_counter() - start) * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(options.rows, 1, options.vocab)).astype(np.float32)
    logits = {"peaked": jax.device_put(3 * noise), "flat": jax.device_put(0.01 * noise)}
    step = jax.jit(partial(sample, vocab_size=options.vocab), donate_argnums=2)
    state = make_state(options.rows + 1, options.vocab)
    started = time.perf_counter()
    table = kinds(options.rows)
    best = dict.fromkeys(table, float("inf"))
    _, (_, state) = timed(step, logits["peaked"], table["greedy"][1], state)
    compiled = time.perf_counter() - started
    for repeat in range(options.repeats):
        for name, (which, batch) in table.items():
            batch = replace(batch, positions=np.full((options.rows, 1), repeat, np.int32))
            took, (_, state) = timed(step, logits[which], batch, state)
            best[name] = min(best[name], took)
    print(f"{options.rows} rows, vocabulary {options.vocab}, least of {options.repeats} calls")
    print(f"one program, compiled in {compiled:.1f} s; {jax.devices()[0].device_kind}")
    for name, took in best.items():
        over = took - best["greedy"]
        print(f"{name:40s} {took:8.2f} ms  {over:+7.2f} ms  {took / best['greedy']:6.1f}x greedy")


if __name__ == "__main__":
    main()
