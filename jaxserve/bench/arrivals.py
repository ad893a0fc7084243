"""When a load generator sends its requests."""

import math
import random
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError


@dataclass(frozen=True)
class Arrivals:
    """request_rate: requests per second, inf = all at once.

    burstiness: shape of the gamma-distributed gaps; 1 is a Poisson process, less comes in bursts,
    more is closer to even spacing. ramp_up: "linear" or "exponential" change of the rate from
    ramp_up_start_rps to ramp_up_end_rps over the requests, instead of request_rate.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or not 0 < self.burstiness < math.inf:
            raise InvalidRequestError(
                f"request_rate is {self.request_rate:g} and burstiness {self.burstiness:g}; "
                "both must be above 0",
                "request_rate",
            )
        if self.ramp_up is None:
            return
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up not in ("linear", "exponential") or not all(
            end is not None and 0 < end < math.inf for end in ends
        ):
            raise InvalidRequestError(
                f"ramp-up {self.ramp_up!r} from {ends[0]} to {ends[1]}; choose linear or "
                "exponential and give a start and an end above 0",
                "ramp_up_strategy",
            )

    def send_times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each of `count` requests is sent, ascending."""
        drawn = random.Random(f"arrivals {seed}")
        now, times = 0.0, []
        for index in range(count):
            times.append(now)
            rate = self._rate(index / max(count - 1, 1))
            if rate < math.inf:
                now += drawn.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
        return times

    def _rate(self, progress: float) -> float:
        if self.ramp_up is None:
            return self.request_rate
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        assert start is not None
        assert end is not None
        if self.ramp_up == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress

    def describe(self, max_concurrency: int | None) -> str:
        if self.ramp_up is not None:
            rate = f"{self.ramp_up_start_rps:g} to {self.ramp_up_end_rps:g} requests/s"
            rate = f"{self.ramp_up} ramp from {rate}"
        elif self.request_rate == math.inf:
            rate = "all requests at once"
        else:
            rate = f"{self.request_rate:g} requests/s, burstiness {self.burstiness:g}"
        limit = "no limit" if max_concurrency is None else f"at most {max_concurrency}"
        return f"{rate}, {limit} in flight"
