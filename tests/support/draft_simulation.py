"""Serving with speculation, simulated: texts whose drafts are right so often, steps that cost so.

Time is in plain decode steps of one row. Costs are noisy, with outliers, and a step that waits for
drafts pays for the host's work too.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.engine.proposers.control import DraftControl
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams

WIDTHS = (1, 2, 3, 5, 9)
ROW_SIZES = (1, 4, 16, 64)

# (request's number, its tokens so far) -> (rate of each draft, how many drafts there are)
Profile = Callable[[int, int], tuple[float, int]]
Cost = Callable[[int, int], float]


def memory_bound(rows: int, width: int) -> float:
    """A step reads the weights, and hardly anything else counts."""
    return 1.0 + 0.002 * rows + 0.02 * rows**0.5 * (width - 1)


def arithmetic_bound(rows: int, width: int) -> float:
    """From 4 tokens on every further one costs its arithmetic."""
    return max(1.0, rows * width / 4) + 0.05


@dataclass
class Simulation:
    """rows requests that decode for ever by `profile`; `run` counts time and tokens."""

    rows: int
    profile: Profile
    cost: Cost
    seed: int = 0
    host: float = 0.03  # of a step, where it is not hidden behind the device
    noise: float = 0.05
    seconds: float = 0.0
    tokens: int = 0
    widths_used: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.requests = [
            Request(str(i), (1, 2), SamplingParams(), max_tokens=1 << 30, seed=0)
            for i in range(self.rows)
        ]
        self.progress = [0] * self.rows

    def run(self, control: DraftControl, num_steps: int, most: int = 8) -> "Simulation":
        for _ in range(num_steps):
            self.step(control, most)
        return self

    def step(self, control: DraftControl, most: int) -> None:
        limits = control.limits(self.requests, [most] * self.rows)
        offers = [self.profile(i, self.progress[i]) for i in range(self.rows)]
        drafted = [min(n, limit) for (_, n), limit in zip(offers, limits, strict=True)]
        width = control.width(self.requests, drafted)
        right = [self.right(rate, n) for (rate, _), n in zip(offers, drafted, strict=True)]
        accepted = [min(n, width - 1) for n in right]
        seconds = self.cost(self.rows, width) + (self.host if any(limits) else 0.0)
        self.seconds += seconds
        noise = self.random.lognormvariate(0.0, self.noise)
        measured = seconds * noise * (3.0 if self.random.random() < 0.01 else 1.0)
        emitted = sum(accepted) + self.rows
        for i, good in enumerate(accepted):
            judged = min(drafted[i], good + 1)  # as `judge` does
            control.observe(self.requests[i].request_id, judged, min(right[i], judged))
            self.progress[i] += good + 1
        control.observe_step(self.rows, width, measured, emitted, drafting=any(limits))
        self.tokens += emitted
        self.widths_used.append(width)

    def right(self, rate: float, num_drafted: int) -> int:
        number = 0
        while number < num_drafted and self.random.random() < rate:
            number += 1
        return number

    @property
    def slowdown(self) -> float:
        """Its time over that of plain decode of the same tokens."""
        return self.seconds * self.rows / self.tokens / self.cost(self.rows, 1)


def simulate(
    rows: int,
    profile: Profile,
    cost: Cost,
    num_steps: int,
    *,
    widths: Sequence[int] = WIDTHS,
    most: int = 8,
    seed: int = 0,
    adaptive: bool = True,
    free: bool = True,
) -> Simulation:
    control = DraftControl(widths, ROW_SIZES, adaptive=adaptive, drafts_are_free=free)
    return Simulation(rows, profile, cost, seed).run(control, num_steps, most)
