"""The real engine as the benchmarks drive it: requests of random ids in, times out, no HTTP."""

import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxserve.config import EngineConfig
from jaxserve.core.backends import weight_layout
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.request import Request
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.model_cache import home
from jaxserve.sampling_params import SamplingParams

Prompt = tuple[int, ...]
Work = Sequence[tuple[Prompt, int]]  # prompts, and how many tokens to draw for each
_FIRST_ORDINARY_ID = 1000  # no special tokens, no bytes


class Loaded:
    """A model in memory, for as many engines as a benchmark compares; they share its weights."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._drawn = random.Random("jaxserve scheduling")

    def engine(self, *, asynchronous: bool = True, **settings: Any) -> Engine:
        """A warm engine."""
        engine = Engine(self.model, EngineConfig(**settings), asynchronous=asynchronous)
        engine.warm_up()
        return engine

    def prompts(self, count: int, length: int) -> list[Prompt]:
        """Prompts that begin like no prompt before."""
        first = min(_FIRST_ORDINARY_ID, self.model.vocab_size // 4)
        ids = range(first, min(40_000, self.model.vocab_size))
        return [tuple(self._drawn.choices(ids, k=length)) for _ in range(count)]


def load(name: str) -> Loaded:
    """A pulled model, or a path. Compiled programs are kept where the server keeps them."""
    use_compile_cache(home() / "compiled")
    return Loaded(load_model(name, weight_layout=weight_layout("auto")))


@dataclass(frozen=True)
class StepRecord:
    """A step: tokens that ran in it, the shape they were padded to, and the device's time."""

    num_tokens: int
    bucket: str
    device_seconds: float


@dataclass
class EngineRun:
    """Drives an engine and notes when every token came. Times are of `time.perf_counter`."""

    engine: Engine
    stats: list[StepStats] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    added: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.observe(self.stats.append)

    def add(self, prompt: Prompt, num_output: int, *, start: float | None = None) -> str:
        """Queue a request; its name."""
        name = f"r{len(self.added)}"
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self.added[name] = time.perf_counter() if start is None else start
        self.token_times[name] = []
        arrival = time.monotonic()
        self.engine.add(
            Request(name, prompt, params, max_tokens=num_output, seed=0, arrival_time=arrival)
        )
        return name

    def step(self) -> None:
        """One call of the loop."""
        for event in self.engine.step():
            assert event.finish_reason in (None, "length"), event
            now = time.perf_counter()
            self.token_times[event.request_id] += [now] * len(event.token_ids)

    def drain(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.has_work:
            self.step()

    def serve(self, work: Work) -> float:
        """All requests at once, to the end; the seconds it took."""
        start = time.perf_counter()
        for prompt, num_output in work:
            self.add(prompt, num_output, start=start)
        self.drain()
        seconds = time.perf_counter() - start
        asked = sum(num_output for _, num_output in work)
        assert sum(map(len, self.token_times.values())) >= asked, "tokens are missing"
        assert self.engine.runner.late_compiles == 0, "something compiled while it was measured"
        return seconds

    def first_token_seconds(self) -> list[float]:
        """From a request's arrival to its first token, in the order of arrival."""
        return [self.token_times[name][0] - start for name, start in self.added.items()]

    def steps(self) -> list[StepRecord]:
        """Every step in order. The asynchronous loop tells a step's time one call later."""
        launched: deque[StepStats] = deque()
        found = []
        for stats in self.stats:
            if stats.step_tokens:
                launched.append(stats)
            if stats.device_seconds:
                step = launched.popleft()
                found.append(StepRecord(step.step_tokens, step.bucket, stats.device_seconds))
        return found
