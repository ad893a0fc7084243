"""What speculation gains or costs a single stream, task by task, against plain decoding.

Usage: python scripts/bench_speculation.py [--model smollm2] [--speculative-config JSON]
       [--expanded] [--held-out N] [--rounds 5] [--tokens 128] [--json FILE]

Two engines in one process, one with speculation and one without, answer the same prompts in turns;
greedy, so that both say the same, which is checked. Measured: seconds per token after the first.
Printed for each task: milliseconds per token of both, the median of the paired ratios with a 95 %
interval (bootstrap over rounds), tokens per step, and the share of drafts that held.

--expanded: packed weights are expanded to float32 first, so that memory is what bounds a step.
--held-out: prompts of which no draft was trained on the answers (scripts/write_answers.py), all of
them one task, instead of the five named ones.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from speculation.prompts import held_out_prompts
from speculation.tasks import TASKS, Task

from jaxserve.config import EngineConfig
from jaxserve.core.backends import weight_layout
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.core.program_loader import ProgramLoader, program_store
from jaxserve.engine.engine import Engine
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.read_prompt import read_conversation
from jaxserve.engine.request import Request
from jaxserve.loading.load import load_model
from jaxserve.loading.load_draft import load_draft
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.model_cache import home
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows
from pallas_kernels.quantized_matmul.reference import dequantize

DEFAULT = '{"method": "ngram", "num_speculative_tokens": 8}'
MOST_SLOWER = 1.03
LEAST_FASTER = 2.0  # where the answer copies
LEAST_HELD_OUT = 1.3


@dataclass(frozen=True)
class Result:
    """Of one task. ratio: plain time / time with speculation, so above 1 is faster."""

    task: str
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
        draft = load_draft(config, model, None, weight_layout("auto"), print)
        self._engine = Engine(model, config, loader=loader, draft=draft)
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
    model: LoadedModel,
    plain: Stream,
    speculative: Stream,
    task: str,
    prompts: Sequence[Sequence[dict[str, str]]],
    tokens: int,
    rounds: int,
) -> Result:
    """One task: its prompts in turns, as many rounds of each. A first round warms both up."""
    read = [read_conversation(model, messages, {}).token_ids for messages in prompts]
    pairs = []
    before = speculative.stats
    for number in range(rounds + 1):
        for prompt in read if number else read[:1]:
            first, second = (plain, speculative) if number % 2 else (speculative, plain)
            answers = {id(s): s.answer(prompt, tokens) for s in (first, second)}
            said, seconds = answers[id(plain)]
            other, faster = answers[id(speculative)]
            assert said == other, f"{task}: speculation changed the answer"
            pairs.append((seconds, faster))
        if not number:
            pairs, before = [], speculative.stats
    news = speculative.stats.since(before)
    ratios = [a / b for a, b in pairs]
    low, high = interval(ratios)
    return Result(
        task,
        statistics.median(a for a, _ in pairs) * 1e3,
        statistics.median(b for _, b in pairs) * 1e3,
        statistics.median(ratios),
        low,
        high,
        news.tokens_per_step,
        news.num_accepted / news.num_drafted if news.num_drafted else 0.0,
    )


def expanded(model: LoadedModel) -> LoadedModel:
    """The model with every packed weight as float32."""

    def is_packed(leaf: object) -> bool:
        return isinstance(leaf, QuantizedArray | StackedRows)

    def expand(leaf: Any) -> Any:
        return dequantize(leaf) if is_packed(leaf) else leaf

    return replace(model, params=jax.tree.map(expand, model.params, is_leaf=is_packed))


def show(result: Result, least: float | None) -> None:
    """least: how much faster it must be; None: at most 3 % slower."""
    if least is not None:
        reached = f">= {least:g} " + ("reached" if result.ratio >= least else "MISSED")
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
    parser.add_argument("--expanded", action="store_true")
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    use_compile_cache(home() / "compiled")
    model = load_model(args.model, weight_layout=weight_layout("auto"))
    if args.expanded:
        model = expanded(model)
    config = SpeculativeConfig.parse(args.speculative_config)
    plain, speculative = Stream(model, None), Stream(model, config)
    weights = "float32" if args.expanded else "as in the file"
    print(
        f"{args.model}, weights {weights}, {args.speculative_config}, {args.tokens} tokens, "
        f"{args.rounds} rounds"
    )
    results = []
    for task, prompts, least in jobs(args.held_out):
        results.append(measure(model, plain, speculative, task, prompts, args.tokens, args.rounds))
        show(results[-1], least)
    if args.json:
        text = json.dumps([asdict(result) for result in results], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


def jobs(held_out: int) -> list[tuple[str, list[list[dict[str, str]]], float | None]]:
    """(name, conversations, how much faster) of each task."""
    if held_out:
        asked = [Task("held-out", prompt, False) for prompt in held_out_prompts(held_out, seed=0)]
        return [("held-out", [task.messages for task in asked], LEAST_HELD_OUT)]
    return [(task.name, [task.messages], LEAST_FASTER if task.copies else None) for task in TASKS]


if __name__ == "__main__":
    main()
