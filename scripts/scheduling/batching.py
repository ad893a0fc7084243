"""Continuous against static batching, one engine each, on outputs of very different lengths.

Requests of 32 prompt tokens, all there at the start, with 10, 50, 200 or 500 output tokens, drawn
evenly. A static batch lasts as long as its longest request, so most of its slots idle most of the
time. *Slot utilisation*: slots of decode steps that drew a token, of all slots (rows times steps).

The *ideal* serves the same trace with every slot busy in every step: all tokens after the first of
each request, divided by the rows, times the measured time of a decode step with all rows; and all
prompts at the best rate at which this engine runs prompts when nobody decodes (full mixed steps).
No schedule of these requests on this engine can take less. What it leaves out, and a real run
cannot: the end of the trace, when the last long requests run with few others, and the padding of
prompts that enter one by one.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.core.buckets import MAX_PREFILL_ROWS
from jaxserve.engine.engine import Engine
from scripts.scheduling.engine_runs import EngineRun, Loaded
from scripts.scheduling.simulation import Simulation, constant_price, make_limits, make_request
from scripts.scheduling.verdicts import Report, Rows, Target

LEAST_RATIO = 1.8
LEAST_OF_IDEAL = 0.9
PROMPT_TOKENS = 32
OUTPUT_LENGTHS = (10, 50, 200, 500)
ROWS = 16
NUM_REQUESTS = 256
MAX_BATCH_TOKENS = 512
Lengths = Sequence[int]


def draw(num_requests: int, lengths: Lengths = OUTPUT_LENGTHS) -> list[int]:
    """The output lengths of a trace; a longer one begins like a shorter one."""
    return random.Random("jaxserve batching").choices(lengths, k=num_requests)


@dataclass(frozen=True)
class Slots:
    """decode_tokens: drawn in decode rows; slots: rows times steps."""

    decode_tokens: int
    steps: int
    rows: int

    @property
    def utilisation(self) -> float:
        return self.decode_tokens / (self.steps * self.rows)


def simulate(outputs: Lengths, batching: str, rows: int = ROWS) -> Slots:
    """The trace through the real scheduler, every step taking the same time."""
    simulation = Simulation(make_limits(rows, batching=batching), constant_price)
    simulation.add(make_request(PROMPT_TOKENS, length) for length in outputs)
    tokens = steps = 0
    for step in simulation.steps():
        tokens += len(step.plan.decode)
        steps += 1
    assert len(simulation.committed) == sum(outputs)
    return Slots(tokens, steps, rows)


def ideal_seconds(run: EngineRun, outputs: Lengths, rows: int, prompt_seconds: float) -> float:
    """What the trace would take with all slots busy. prompt_seconds: of one prompt token."""
    decode = [s for s in run.steps() if s.bucket == f"decode{rows}"]
    most = max(s.num_tokens for s in decode)  # all rows, unless the trace is tiny
    step = statistics.median(s.device_seconds for s in decode if s.num_tokens == most)
    decode_tokens = sum(outputs) - len(outputs)
    return decode_tokens / rows * step + PROMPT_TOKENS * len(outputs) * prompt_seconds


def prompt_seconds(engine: Engine, loaded: Loaded) -> float:
    """Seconds of a prompt token where prompts fill the largest step and nobody decodes."""
    prompts = loaded.prompts(4 * MAX_PREFILL_ROWS, MAX_BATCH_TOKENS // MAX_PREFILL_ROWS)
    run = EngineRun(engine)
    run.serve([(prompt, 1) for prompt in prompts])
    full = [s.device_seconds for s in run.steps() if s.num_tokens == MAX_BATCH_TOKENS]
    return statistics.median(full) / MAX_BATCH_TOKENS


def run(loaded: Loaded, rounds: int, num_requests: int, lengths: Lengths) -> Report:
    """Both ways in turns; the median of the rounds counts."""
    outputs = draw(num_requests, lengths)
    engines = {
        way: loaded.engine(
            max_batch_rows=ROWS,
            max_batch_tokens=MAX_BATCH_TOKENS,
            batching=way,
            prefix_cache=False,
        )
        for way in ("continuous", "static")
    }
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    slots: dict[str, Slots] = {}
    ideals = []
    per_token = prompt_seconds(engines["continuous"], loaded)
    for number in range(rounds):
        prompts = loaded.prompts(num_requests, PROMPT_TOKENS)
        for way in sorted(engines, reverse=bool(number % 2)):
            run = EngineRun(engines[way])
            seconds[way].append(run.serve(list(zip(prompts, outputs, strict=True))))
            slots[way] = Slots(sum(outputs) - num_requests, len(run.steps()), ROWS)
            if way == "continuous":
                ideals.append(ideal_seconds(run, outputs, ROWS, per_token))
    return _report(outputs, seconds, slots, ideals)


def _report(
    outputs: Lengths, seconds: dict[str, list[float]], slots: dict[str, Slots], ideals: list[float]
) -> Report:
    total = sum(outputs)
    rows: Rows = [("", "seconds", "tok/s", "steps", "slots used", "simulated")]
    for way, taken in seconds.items():
        middle = statistics.median(taken)
        simulated = simulate(outputs, way)
        used = f"{slots[way].utilisation:.1%}"
        rows.append(
            (way, f"{middle:.1f}", f"{total / middle:.1f}", f"{slots[way].steps:,}", used,
             f"{simulated.utilisation:.1%}")
        )  # fmt: skip
    ideal = statistics.median(ideals)
    rows.append(("ideal", f"{ideal:.1f}", f"{total / ideal:.1f}", "", "100.0%", ""))
    pairs = zip(seconds["static"], seconds["continuous"], strict=True)
    ratio = statistics.median(static / continuous for static, continuous in pairs)
    shares = zip(ideals, seconds["continuous"], strict=True)
    share = statistics.median(best / taken for best, taken in shares)
    return Report(
        "batching",
        f"{len(outputs)} requests, {PROMPT_TOKENS} prompt tokens, {total:,} output tokens, "
        f"{ROWS} rows, median of {len(ideals)} rounds",
        rows,
        ["simulated: slots used when every step takes the same time and nothing is measured"],
        [
            Target("continuous / static, tokens per second", ratio, LEAST_RATIO, at_least=True),
            Target("continuous / ideal, tokens per second", share, LEAST_OF_IDEAL, at_least=True),
        ],
        {"seconds": seconds, "ideal_seconds": ideals},
    )
