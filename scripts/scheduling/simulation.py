"""The real scheduler and KV manager over steps that are not computed, only priced.

What a step takes is a function of its plan, so a run is exact and takes no model. As in the engine,
a step is planned before the one before it is committed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxserve.core.buckets import Bucket, bucket_table, pick_bucket, prefill_sizes
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.plan import Committed, Limits, Plan
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.step_times import StepTimes
from jaxserve.sampling_params import SamplingParams

Price = Callable[[Plan, Bucket], float]  # seconds of a step

_numbers = itertools.count()


def make_request(num_prompt: int, num_output: int, name: str = "") -> Request:
    """A request that shares no prefix with another and runs to its full output length."""
    number = next(_numbers)
    prompt = tuple((number * 7919 + index * 31) % 50_000 for index in range(num_prompt))
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return Request(name or f"r{number}", prompt, params, max_tokens=num_output, seed=0)


def make_limits(
    max_batch_rows: int, max_batch_tokens: int = 512, batching: str = "continuous"
) -> Limits:
    """As an engine of these settings has them."""
    buckets = bucket_table(max_batch_rows, max_batch_tokens)
    return Limits(
        max_batch_rows=max_batch_rows,
        max_batch_tokens=max_batch_tokens,
        max_prefill_rows=max(bucket.prefill_rows for bucket in buckets),
        max_model_len=8192,
        max_queue=100_000,
        prefill_sizes=prefill_sizes(buckets),
        batching=batching,
    )


@dataclass(frozen=True)
class Step:
    """A step in flight, and when it began."""

    plan: Plan
    bucket: Bucket
    began: float
    seconds: float


class Simulation:
    """One engine's host side. `committed` says when each new token came, in simulated seconds."""

    def __init__(
        self,
        limits: Limits,
        price: Price,
        *,
        num_pages: int = 1 << 16,
        page_size: int = 16,
        prefix_cache: bool = False,
        step_times: StepTimes | None = None,
    ) -> None:
        self.manager = KVManager(
            num_pages,
            page_size,
            max_chunk=limits.max_chunk or limits.max_batch_tokens,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(limits, self.manager, step_times)
        self.now = 0.0
        self.committed: list[tuple[float, Committed]] = []
        self._buckets = bucket_table(limits.max_batch_rows, limits.max_batch_tokens)
        self._price = price
        self._in_flight: Step | None = None

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.scheduler.add(request)

    def steps(self) -> Iterator[Step]:
        """Run until there is nothing to do. Each step is yielded when it is in flight, the one
        before it committed: when an engine tells its statistics."""
        while self.scheduler.has_work or self._in_flight is not None:
            previous, self._in_flight = self._in_flight, None
            plan = self.scheduler.schedule()
            began = self.now + (0.0 if previous is None else previous.seconds)
            if not plan.is_empty:
                bucket = pick_bucket(
                    self._buckets, len(plan.decode), len(plan.prefill), plan.num_prefill_tokens
                )
                step = Step(plan, bucket, began, self._price(plan, bucket))
                self._in_flight = step
            if previous is not None:
                self._finish(previous)
            if self._in_flight is not None:
                yield self._in_flight

    def _finish(self, step: Step) -> None:
        self.now += step.seconds
        plan = step.plan
        self.scheduler.step_times.observe(
            len(plan.decode),
            step.bucket.prefill_tokens if plan.prefill else 0,
            step.seconds,
            plan.num_prefill_pairs,
        )
        tokens = {
            item.request.request_id: [7] for item in (*plan.decode, *plan.prefill) if item.samples
        }
        self.committed += [(self.now, news) for news in self.scheduler.commit(plan, tokens)]


def constant_price(plan: Plan, bucket: Bucket) -> float:
    """Every step takes one unit."""
    del plan, bucket
    return 1.0
