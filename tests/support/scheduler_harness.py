"""A scheduler in a loop with a fake device that keeps what is written to pages, token by token.

Every query checks that all it sees is where the page lists say, in every group's window. A page
lent to two requests, given back too early, or moved wrongly, or a chunk skipped or run twice fails
there; outputs are compared with the plain loop in `expected_output`.
"""

import zlib
from collections import deque

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.plan import Committed, Limits, Plan, Scheduled, Transfers
from jaxserve.engine.request import Request, Status
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.step_times import StepTimes
from jaxserve.sampling_params import SamplingParams

type Slot = tuple[int, int]  # position and token

VOCAB = 40
EOS = 0
LIMITS = Limits(
    max_batch_rows=4, max_batch_tokens=64, max_prefill_rows=4, max_model_len=4096, max_queue=100
)


def next_token(context: list[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCAB


def make_request(
    request_id: str,
    num_prompt: int,
    max_tokens: int = 5,
    *,
    priority: int = 0,
    stem: tuple[int, ...] = (),
    **params: object,
) -> Request:
    """num_prompt tokens of its own behind `stem`. ignore_eos unless the test says otherwise, so
    that lengths are known."""
    values = {"max_tokens": max_tokens, "ignore_eos": True, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=stem + tuple(zlib.crc32(f"{request_id}{i}".encode()) % VOCAB
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
        windows: tuple[int | None, ...] = (None,),
        prefix_cache: bool = False,
        host_pages: int = 0,
        step_times: StepTimes | None = None,
        depth: int = 0,
    ) -> None:
        self.manager = KVManager(
            num_pages,
            page_size,
            windows,
            max_chunk=limits.max_chunk or limits.max_batch_tokens,
            prefix_cache=prefix_cache,
            host_pages=host_pages,
        )
        self.scheduler = Scheduler(limits, self.manager, step_times)
        self.max_total = min(limits.max_model_len, self.manager.capacity_tokens + 1)
        self.depth = depth
        self.in_flight: deque[tuple[Plan, dict[str, int]]] = deque()
        self.device: dict[int, dict[int, Slot]] = {}  # page -> offset -> what was written there
        self.host: dict[int, dict[int, Slot]] = {}
        self.drawn: dict[str, tuple[Request, int]] = {}
        self.covered: dict[tuple[Request, int], int] = {}
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
            self.move(plan.transfers)
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
        """The moves, then all writes, then all reads, as on the device. Chunks must follow each
        other exactly."""
        self.move(plan.transfers)
        items = (*plan.decode, *plan.prefill)
        for item in items:
            request = item.request
            key = (request, request.num_preemptions)
            assert item.start == self.covered.get(key, item.start)
            stop = self.covered[key] = item.start + item.num_tokens
            for position in range(item.start, stop):
                slot = (position, self.token(request, position))
                for pages in request.pages:
                    page, offset = self.place(pages, position)
                    assert page > 0, "a token is written to a page that was given back"
                    self.device.setdefault(page, {})[offset] = slot
        drawn = {}
        for item in items:
            self.check_what_is_seen(item)
            if item.samples:
                request = item.request
                length = item.start + item.num_tokens
                context = [self.token(request, i) for i in range(length)]
                drawn[request.request_id] = next_token(context)
        self.drawn |= {
            item.request.request_id: (item.request, drawn[item.request.request_id])
            for item in items
            if item.samples
        }
        return drawn

    def check_what_is_seen(self, item: Scheduled) -> None:
        """The step's queries find every token before them, as far as each group's window goes."""
        request = item.request
        for pages, window in zip(request.pages, self.manager.windows, strict=True):
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, item.start + item.num_tokens):
                page, offset = self.place(pages, position)
                seen = self.device.get(page, {}).get(offset)
                wanted = (position, self.token(request, position))
                assert page > 0, f"{request.request_id} sees a page that was given back"
                assert seen == wanted, f"{request.request_id} sees {seen} instead of {wanted}"

    def token(self, request: Request, position: int) -> int:
        """A token of a request, even if a step in flight drew it and only the device knows it."""
        if position < request.num_tokens:
            return request.token_ids(position, position + 1)[0]
        owner, token = self.drawn[request.request_id]
        assert owner is request
        assert position == request.num_tokens
        return token

    def move(self, transfers: Transfers) -> None:
        for page, slot in transfers.stores:
            self.host[slot] = dict(self.device.get(page, {}))
        copied = [(to, dict(self.device.get(source, {}))) for source, to in transfers.copies]
        self.device |= copied
        for slot, page in transfers.loads:
            self.device[page] = dict(self.host[slot])

    def place(self, pages: list[int], position: int) -> tuple[int, int]:
        page_size = self.manager.page_size
        return pages[position // page_size], position % page_size

    def lose_pool(self) -> None:
        """A step failed: what the pool held is gone, with everything in flight."""
        self.scheduler.preempt_all()
        self.in_flight.clear()
        self.device.clear()
        self.host.clear()
        self.scheduler.check_integrity()

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        while self.in_flight:
            self.commit()
        assert not self.scheduler.has_work, f"still work after {max_steps} steps"
        assert self.manager.num_used == 0

    def check_outputs(self, *requests: Request) -> None:
        for request in requests:
            output, reason = expected_output(request, self.max_total)
            assert request.output_token_ids == output, request.request_id
            assert self.finished[request.request_id] == (request, reason)


def ids(items: tuple) -> list[str]:
    return [getattr(item, "request", item).request_id for item in items]
