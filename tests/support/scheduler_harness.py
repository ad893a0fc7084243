"""A scheduler in a loop with a fake model that reads its context back from the pages it was given.

A page lent to two requests, a chunk skipped or run twice, or a token appended twice changes the
fake model's tokens; runs are compared with the plain loop in `expected_output`.
"""

import zlib
from collections import Counter, deque

from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import Committed, Limits, Plan
from jaxserve.engine.request import Request, Status
from jaxserve.engine.scheduler import Scheduler
from jaxserve.sampling_params import SamplingParams

VOCAB = 40
EOS = 0
LIMITS = Limits(
    max_batch_rows=4, max_batch_tokens=64, max_prefill_rows=4, max_model_len=4096, max_queue=100
)


def next_token(context: list[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCAB


def make_request(
    request_id: str, num_prompt: int, max_tokens: int = 5, *, priority: int = 0, **params: object
) -> Request:
    """ignore_eos unless the test says otherwise, so that lengths are known."""
    values = {"max_tokens": max_tokens, "ignore_eos": True, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(zlib.crc32(f"{request_id}{i}".encode()) % VOCAB
                               for i in range(num_prompt)),
        params=SamplingParams(**values),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        seed=0,
        eos_token_ids=(EOS,),
        priority=priority,
    )  # fmt: skip


def expected_output(request: Request, max_total: int) -> tuple[list[int], str]:
    """The same run with no pages, chunks, batches or preemptions."""
    params = request.params
    prompt = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        output.append(next_token(prompt + output))
        stops = output[-1] in params.stop_token_ids
        stops |= output[-1] == EOS and not params.ignore_eos
        if stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens or len(prompt) + len(output) == max_total:
            return output, "length"


class Harness:
    """A scheduler, the fake device, and the loop between them; `depth` plans may be in flight."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        num_pages: int = 200,
        page_size: int = 4,
        num_groups: int = 2,
        depth: int = 0,
    ) -> None:
        self.allocator = PageAllocator(num_pages, page_size, num_groups)
        self.scheduler = Scheduler(limits, self.allocator)
        self.max_total = min(limits.max_model_len, self.allocator.capacity_tokens + 1)
        self.depth = depth
        self.in_flight: deque[tuple[Plan, dict[str, int]]] = deque()
        self.slots: dict[int, int] = {}
        self.drawn: dict[str, int] = {}
        self.covered: Counter[tuple[str, int]] = Counter()
        self.finished: dict[str, tuple[Request, str]] = {}
        self.steps = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.scheduler.check_integrity()

    def step(self) -> Plan:
        """Schedule and run one step, then commit what is older than `depth`."""
        plan = self.schedule()
        if plan.is_empty:
            assert self.in_flight or not self.scheduler.has_work, "work, but nothing scheduled"
        else:
            self.steps += 1
            self.in_flight.append((plan, self.run(plan)))
        while len(self.in_flight) > (0 if plan.is_empty else self.depth):
            self.commit()
        return plan

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        limits = self.scheduler.limits
        ids = [item.request.request_id for item in (*plan.decode, *plan.prefill)]
        assert len(ids) == len(set(ids)) <= limits.max_batch_rows
        assert len(plan.prefill) <= limits.max_prefill_rows
        assert plan.num_prefill_tokens <= limits.max_batch_tokens
        assert all(item.num_tokens == 1 and item.samples for item in plan.decode)
        assert all(item.num_tokens >= 1 for item in plan.prefill)
        if limits.max_chunk:
            assert all(item.num_tokens <= limits.max_chunk for item in plan.prefill)
        return plan

    def commit(self) -> list[Committed]:
        plan, tokens = self.in_flight.popleft()
        committed = self.scheduler.commit(plan, tokens)
        self.scheduler.check_integrity()
        for request, token, reason, _ in committed:
            assert request.output_token_ids[-1] == token
            if reason is not None:
                assert request.request_id not in self.finished
                assert request.status is Status.FINISHED
                self.finished[request.request_id] = (request, reason)
        return committed

    def run(self, plan: Plan) -> dict[str, int]:
        """All writes, then all reads, as a step does. Chunks must follow each other exactly."""
        items = (*plan.decode, *plan.prefill)
        for item in items:
            request = item.request
            key = (request.request_id, request.num_preemptions)
            assert item.start == self.covered[key]
            self.covered[key] += item.num_tokens
            tokens = request.token_ids(item.start, item.start + item.num_tokens)
            if not tokens:  # drawn by a step in flight: known to the device alone
                tokens = [self.drawn[request.request_id]]
            assert len(tokens) == item.num_tokens
            for position, token in enumerate(tokens, item.start):
                self.slots[self.slot(request, position)] = token
        drawn = {}
        for item in items:
            if item.samples:
                stop = item.start + item.num_tokens
                context = [self.slots[self.slot(item.request, i)] for i in range(stop)]
                drawn[item.request.request_id] = next_token(context)
        self.drawn.update(drawn)
        return drawn

    def slot(self, request: Request, position: int) -> int:
        page_size = self.allocator.page_size
        return request.pages[-1][position // page_size] * page_size + position % page_size

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        while self.in_flight:
            self.commit()
        assert not self.scheduler.has_work, f"still work after {max_steps} steps"
        assert self.allocator.num_used == 0

    def check_outputs(self, *requests: Request) -> None:
        for request in requests:
            output, reason = expected_output(request, self.max_total)
            assert request.output_token_ids == output, request.request_id
            assert self.finished[request.request_id] == (request, reason)


def ids(items: tuple) -> list[str]:
    return [getattr(item, "request", item).request_id for item in items]
