"""The asynchronous loop against the synchronous one: time, idle device, hidden host work.

Three tasks, each run by both loops in turns, the order changing from round to round, so that
what the machine does meanwhile meets both. Per task: the ratio of the two times of a round, its
geometric mean over the rounds and the 95 % interval of that mean (Student's t on the logarithms of
the paired ratios). An upper end below 1 excludes that the asynchronous loop is slower.

*Idle*: from a step's end to the next one's start, while there is work, as far as the host can tell
(an upper bound). *Host*: time of the loop that was not spent waiting for the device. What of it is
not idle time of the device is *hidden* behind the step that runs.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.engine import Engine
from scripts.scheduling.engine_runs import EngineRun, Loaded, Work
from scripts.scheduling.verdicts import Report, Rows, Target

ROWS = 16
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last stands for more, too.
_T975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
LOOPS = ("asynchronous", "synchronous")


@dataclass(frozen=True)
class PerStep:
    """Means over the steps of a run, in seconds."""

    idle: float
    host: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.host - self.idle)


def tasks(scale: float) -> dict[str, Callable[[Loaded], Work]]:
    """By name. scale: a share of the usual number of tokens, for a quick look."""

    def tokens(count: int) -> int:
        return max(4, round(count * scale))

    def decode(rows: int, length: int) -> Callable[[Loaded], Work]:
        return lambda loaded: [(prompt, tokens(length)) for prompt in loaded.prompts(rows, 32)]

    def chat(loaded: Loaded) -> Work:
        """Prompts of 16 to 512 tokens, outputs of 8 to 128, few of the long ones."""
        drawn = random.Random("jaxserve chat")
        lengths = [
            (round(2 ** drawn.uniform(4, 9)), round(2 ** drawn.uniform(3, 7)))
            for _ in range(max(2, round(32 * scale)))
        ]
        return [(loaded.prompts(1, prompt)[0], output) for prompt, output in lengths]

    return {"decode 1": decode(1, 128), f"decode {ROWS}": decode(ROWS, 96), "chat": chat}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95 % interval, (low, mean, high)."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return 0.0, math.exp(mean), math.inf
    t = _T975[min(len(logs) - 2, len(_T975) - 1)]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def serve(engine: Engine, work: Work) -> tuple[float, PerStep]:
    run = EngineRun(engine)
    seconds = run.serve(work)
    steps = sum(1 for stats in run.stats if stats.step_tokens)
    idle = sum(stats.device_idle_seconds for stats in run.stats)
    host = sum(stats.host_seconds for stats in run.stats)
    return seconds, PerStep(idle / steps, host / steps)


def run(loaded: Loaded, rounds: int, scale: float) -> Report:
    engines = {
        loop: loaded.engine(
            asynchronous=loop == "asynchronous", max_batch_rows=ROWS, prefix_cache=False
        )
        for loop in LOOPS
    }
    for engine in engines.values():  # step times become known, threads have started
        EngineRun(engine).serve(tasks(0.1)["chat"](loaded))
    heads = ("seconds", "async / sync", "95 % interval", "", "idle", "host", "hidden ms/step")
    rows: Rows = [("", *heads)]
    targets, numbers = list[Target](), dict[str, Any]()
    for name, make in tasks(scale).items():
        seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        per_step: dict[str, list[PerStep]] = {loop: [] for loop in LOOPS}
        for number in range(rounds):
            work = make(loaded)
            for loop in LOOPS if number % 2 else reversed(LOOPS):
                taken, means = serve(engines[loop], work)
                seconds[loop].append(taken)
                per_step[loop].append(means)
        ratios = [a / b for a, b in zip(*(seconds[loop] for loop in LOOPS), strict=True)]
        low, mean, high = interval(ratios)
        for loop in LOOPS:
            shown = [f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}"] if loop == LOOPS[0] else [""] * 3
            times = [
                f"{1e3 * statistics.median(getattr(one, kind) for one in per_step[loop]):.2f}"
                for kind in ("idle", "host", "hidden")
            ]
            middle = f"{statistics.median(seconds[loop]):.2f}"
            rows.append((f"{name}, {loop}", middle, *shown, *times))
        targets.append(Target(f"{name}: upper end of the interval", high, 1.0))
        numbers[name] = {"seconds": seconds, "interval": [low, mean, high]}
    return Report("overlap", f"{rounds} rounds in turns, {ROWS} rows", rows, [], targets, numbers)
