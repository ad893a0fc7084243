"""What speculation gains or costs a single stream, task by task, against plain decoding.

Usage: python scripts/bench_speculation.py [--model smollm2] [--speculative-config JSON]
       [--rounds 5] [--tokens 128] [--json FILE]

Two engines in one process, one with speculation and one without, answer the same prompts in turns;
greedy, so that both say the same, which is checked. Measured: seconds per token after the first.
Printed for each task: milliseconds per token of both, the median of the paired ratios with a 95 %
interval (bootstrap over rounds), tokens per step, and the share of drafts that held.
"""

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from speculation.tasks import TASKS

from jaxserve.config import EngineConfig
from jaxserve.core.backends import weight_layout
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.core.program_loader import ProgramLoader, program_store
from jaxserve.engine.engine import Engine
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.read_prompt import read_conversation
from jaxserve.engine.request import Request
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.model_cache import home
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig

DEFAULT = '{"method": "ngram", "num_speculative_tokens": 8}'
MOST_SLOWER = 1.03
LEAST_FASTER = 2.0  # where the answer copies


@dataclass(frozen=True)
class Result:
    """Of one task. ratio: plain time / time with speculation, so above 1 is faster."""

    task: str
    copies: bool
    plain_ms: float
    speculative_ms: float
    ratio: float
    low: float
    high: float
    tokens_per_step: float
    held: float


class Stream:
    """One engine, answering one request after the other."""

    def __init__(self, model: LoadedModel, speculative: SpeculativeConfig | None) -> None:
        config = EngineConfig(
            speculative=speculative, max_batch_rows=4, prefix_cache=False, max_model_len=2048
        )
        loader = ProgramLoader(program_store())
        self._model = model
        self._engine = Engine(model, config, loader=loader)
        self._engine.warm_up()

    @property
    def stats(self) -> SpeculationStats:
        return self._engine.speculation or SpeculationStats()

    def answer(self, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], float]:
        """The answer, and its seconds per token after the first ones."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        ends = self._model.eos_token_ids
        self._engine.add(Request("bench", prompt, params, tokens, seed=0, eos_token_ids=ends))
        said: list[int] = []
        began, first = 0.0, 0
        while self._engine.has_work:
            for event in self._engine.step():
                said += event.token_ids
                if not began:
                    began, first = time.perf_counter(), len(said)
        return said, (time.perf_counter() - began) / (len(said) - first)


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled rounds."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return medians[50], medians[-51]


def measure(
    model: LoadedModel, plain: Stream, speculative: Stream, tokens: int, rounds: int
) -> list[Result]:
    results = []
    for task in TASKS:
        prompt = read_conversation(model, task.messages, {}).token_ids
        before = speculative.stats
        pairs = []
        for number in range(rounds + 1):
            first, second = (plain, speculative) if number % 2 else (speculative, plain)
            answers = {id(s): s.answer(prompt, tokens) for s in (first, second)}
            said, seconds = answers[id(plain)]
            other, faster = answers[id(speculative)]
            assert said == other, f"{task.name}: speculation changed the answer"
            if number:  # the first round warms both up
                pairs.append((seconds, faster))
            else:
                before = speculative.stats
        news = speculative.stats.since(before)
        ratios = [a / b for a, b in pairs]
        low, high = interval(ratios)
        results.append(
            Result(
                task.name,
                task.copies,
                statistics.median(a for a, _ in pairs) * 1e3,
                statistics.median(b for _, b in pairs) * 1e3,
                statistics.median(ratios),
                low,
                high,
                news.tokens_per_step,
                news.num_accepted / news.num_drafted if news.num_drafted else 0.0,
            )
        )
        show(results[-1])
    return results


def show(result: Result) -> None:
    if result.copies:
        reached = f">= {LEAST_FASTER:g} " + (
            "reached" if result.ratio >= LEAST_FASTER else "MISSED"
        )
    else:
        fine = result.high >= 1 / MOST_SLOWER
        reached = "at most 3 % slower " + ("reached" if fine else "MISSED")
    print(
        f"{result.task:10s} plain {result.plain_ms:6.2f} ms/token, speculative "
        f"{result.speculative_ms:6.2f}: {result.ratio:.2f}x ({result.low:.2f} to "
        f"{result.high:.2f}), {result.tokens_per_step:.2f} tokens a step, "
        f"{result.held:.0%} of drafts held   {reached}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculative-config", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    use_compile_cache(home() / "compiled")
    model = load_model(args.model, weight_layout=weight_layout("auto"))
    config = SpeculativeConfig.parse(args.speculative_config)
    plain, speculative = Stream(model, None), Stream(model, config)
    print(f"{args.model}, {args.speculative_config}, {args.tokens} tokens, {args.rounds} rounds")
    results = measure(model, plain, speculative, args.tokens, args.rounds)
    if args.json:
        text = json.dumps([asdict(result) for result in results], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
