"""What a long prompt does to those who are reading: gaps between tokens of running streams.

Eight streams decode; then a prompt of 6,000 tokens arrives. A stream's gap is the time between two
of its tokens. Told are the median gap before the long prompt came and the worst one from then until
its first token, three ways:

- *as it is*: a step's prefill part is as large as keeps it within the predicted time;
- *no predicted time*: chunks of max_batch_tokens (512), whatever they take;
- *no chunks*: the whole prompt in one step.
"""

import statistics
import sys
import time
from dataclasses import dataclass

from jaxserve.engine.engine import Engine
from jaxserve.engine.step_times import StepTimes
from scripts.scheduling.engine_runs import EngineRun, Loaded
from scripts.scheduling.verdicts import Report, Rows, Target

MOST_STALL = 3.0
NUM_STREAMS = 8
STREAM_PROMPT = 128
LONG_PROMPT = 6000
STEPS_BEFORE = 60  # whose gaps give the median
WARM_UP_PROMPT = 1200  # of a long prompt before, so that step times are known, as in any server
MAX_OUTPUT = 4000  # streams are still running when the long prompt has its first token


class NoTimeLimit(StepTimes):
    """Steps carry whatever fits the token budget."""

    def prefill_limit(self, num_decode: int, sizes: tuple[int, ...], context: int = 0) -> int:
        del num_decode, context
        return sizes[-1] if sizes else sys.maxsize


@dataclass(frozen=True)
class Stall:
    """Seconds. first_token: from the long prompt's arrival to its first token."""

    median_gap: float
    worst_gap: float
    first_token: float

    @property
    def ratio(self) -> float:
        return self.worst_gap / self.median_gap


def measure(engine: Engine, loaded: Loaded, long_prompt: int) -> Stall:
    """One arrival. The engine has nothing to do before and after."""
    run = EngineRun(engine)
    room = engine.max_model_len - STREAM_PROMPT
    streams = [
        run.add(prompt, min(MAX_OUTPUT, room))
        for prompt in loaded.prompts(NUM_STREAMS, STREAM_PROMPT)
    ]
    _step_until_first_token(run, streams[-1])
    _step_until_first_token(run, run.add(loaded.prompts(1, WARM_UP_PROMPT)[0], 1))
    start = len(run.token_times[streams[0]])
    while len(run.token_times[streams[0]]) < start + STEPS_BEFORE:
        run.step()
    arrival = time.perf_counter()
    name = run.add(loaded.prompts(1, long_prompt)[0], 1)
    _step_until_first_token(run, name)
    run.step()  # the gap in which the prompt's last chunk ran ends here
    first = run.token_times[name][0]
    median_gap, worst_gap = _gaps([run.token_times[stream] for stream in streams], start, arrival)
    for stream in streams:
        engine.abort(stream)
    while engine.has_work:
        engine.step()
    return Stall(median_gap, worst_gap, first - arrival)


def _step_until_first_token(run: EngineRun, name: str) -> None:
    while not run.token_times[name]:
        run.step()


def _gaps(times: list[list[float]], start: int, arrival: float) -> tuple[float, float]:
    """The median gap before the arrival, from token `start` on, and the worst that ended after."""
    before, after = list[float](), list[float]()
    for stream in times:
        for earlier, later in zip(stream[start:], stream[start + 1 :], strict=False):
            (after if later > arrival else before).append(later - earlier)
    return statistics.median(before), max(after)


def run(loaded: Loaded, rounds: int, long_prompt: int) -> Report:
    chunked = {"as it is": loaded.engine(), "no predicted time": loaded.engine()}
    chunked["no predicted time"].scheduler.step_times = NoTimeLimit()
    found = {
        way: [measure(engine, loaded, long_prompt) for _ in range(rounds)]
        for way, engine in chunked.items()
    }
    del chunked
    whole = loaded.engine(max_batch_tokens=max(long_prompt, WARM_UP_PROMPT))
    whole.scheduler.step_times = NoTimeLimit()
    found["no chunks"] = [measure(whole, loaded, long_prompt)]
    rows: Rows = [("", "median gap ms", "worst gap ms", "worst / median", "first token s")]
    for way, stalls in found.items():
        one = sorted(stalls, key=lambda stall: stall.ratio)[len(stalls) // 2]
        rows.append(
            (way, f"{one.median_gap * 1e3:.1f}", f"{one.worst_gap * 1e3:.1f}", f"{one.ratio:.2f}",
             f"{one.first_token:.1f}")
        )  # fmt: skip
    ratio = statistics.median(stall.ratio for stall in found["as it is"])
    return Report(
        "stall",
        f"a prompt of {long_prompt} tokens among {NUM_STREAMS} streams, median of {rounds} rounds",
        rows,
        targets=[Target("worst gap / median gap before, as it is", ratio, MOST_STALL)],
        numbers={"ratios": {way: [s.ratio for s in stalls] for way, stalls in found.items()}},
    )
