"""A scheduler in a loop with a fake device that keeps what is written to pages, token by token.

Every query checks that all it sees is where the page lists say, in every group's window. A page
lent to two requests, given back too early, or moved wrongly, or a chunk skipped or run twice fails
there; outputs are compared with the plain loop in `expected_output`.
"""

import zlib
from collections import deque
from collections.abc import Callable

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
        guess: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        """guess: drafts of what follows a context, for every request that decodes (depth 0)."""
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
        assert guess is None or not depth, "drafts need their last token"
        self.depth = depth
        self.guess = guess
        self.in_flight: deque[tuple[Plan, dict[str, list[int]]]] = deque()
        self.device: dict[int, dict[int, Slot]] = {}  # page -> offset -> what was written there
        self.host: dict[int, dict[int, Slot]] = {}
        self.drawn: dict[str, tuple[Request, dict[int, int]]] = {}  # position -> token
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
        plan = self.scheduler.schedule(self.drafts())
        self.scheduler.check_integrity()
        limits = self.scheduler.limits
        ids = [item.request.request_id for item in (*plan.decode, *plan.prefill)]
        assert len(ids) == len(set(ids)) <= limits.max_batch_rows
        assert len(plan.prefill) <= limits.max_prefill_rows
        assert plan.num_prefill_tokens <= limits.max_batch_tokens
        assert all(item.num_tokens == 1 + len(item.drafts) for item in plan.decode)
        assert all(item.samples for item in plan.decode)
        if plan.steps > 1:
            assert plan.steps <= limits.max_burst
            assert plan.width == 1
        if plan.steps > 1 or plan.width > 1:
            assert not plan.prefill
        assert all(item.num_tokens >= 1 for item in plan.prefill)
        if limits.max_chunk:
            assert all(item.num_tokens <= limits.max_chunk for item in plan.prefill)
        return plan

    def commit(self) -> list[Committed]:
        plan, tokens = self.in_flight.popleft()
        committed = self.scheduler.commit(plan, tokens)
        self.scheduler.check_integrity()
        for request, kept, reason, _ in committed:
            assert tuple(request.output_token_ids[-len(kept) :]) == kept
            if reason is not None:
                assert request.request_id not in self.finished
                assert request.status is Status.FINISHED
                self.finished[request.request_id] = (request, reason)
        return committed

    def drafts(self) -> dict[str, list[int]]:
        if self.guess is None:
            return {}
        running = self.scheduler.running
        guesses = {r.request_id: self.guess(r.token_ids(0, r.num_tokens)) for r in running}
        return {name: guess for name, guess in guesses.items() if guess}

    def run(self, plan: Plan) -> dict[str, list[int]]:
        """The moves, then all writes, then all reads, as on the device, as many times as there are
        steps. Chunks must follow each other exactly."""
        self.move(plan.transfers)
        drawn: dict[str, list[int]] = {}
        for step in range(plan.steps):
            items = [
                item._replace(start=item.start + step) for item in (*plan.decode, *plan.prefill)
            ]
            for item in items:
                self.write(item)
            for item in items:
                self.check_what_is_seen(item)
                if item.samples:
                    tokens = self.draw(item)
                    wrong = 1 + len(item.drafts) - len(tokens)
                    self.covered[item.request, item.epoch] -= wrong
                    self.keep_drawn(item, tokens)
                    drawn.setdefault(item.request.request_id, []).extend(tokens)
        return drawn

    def keep_drawn(self, item: Scheduled, tokens: list[int]) -> None:
        """What only the device knows until it is committed."""
        name, first = item.request.request_id, item.start + item.num_tokens - len(item.drafts)
        owner, known = self.drawn.get(name, (None, {}))
        if owner is not item.request:
            known = {}
        known |= dict(enumerate(tokens, first))
        self.drawn[name] = (item.request, known)

    def write(self, item: Scheduled) -> None:
        request = item.request
        key = (request, request.num_preemptions)
        assert item.start == self.covered.get(key, item.start)
        self.covered[key] = item.start + item.num_tokens
        tokens = self.tokens_of(item)
        for position, token in enumerate(tokens, item.start):
            for pages in request.pages:
                page, offset = self.place(pages, position)
                assert page > 0, "a token is written to a page that was given back"
                self.device.setdefault(page, {})[offset] = (position, token)

    def tokens_of(self, item: Scheduled) -> list[int]:
        """Those that run."""
        known = range(item.start, item.start + item.num_tokens - len(item.drafts))
        return [self.token(item.request, i) for i in known] + list(item.drafts)

    def draw(self, item: Scheduled) -> list[int]:
        """The token after the last one, and one more after each draft that holds."""
        context = [self.token(item.request, i) for i in range(item.start)]
        context += self.tokens_of(item)
        length = len(context) - len(item.drafts)
        tokens = [next_token(context[:length])]
        for draft in item.drafts:
            if draft != tokens[-1]:
                break
            length += 1
            tokens.append(next_token(context[:length]))
        return tokens

    def check_what_is_seen(self, item: Scheduled) -> None:
        """The step's queries find every token before them, as far as each group's window goes."""
        request = item.request
        tokens = self.tokens_of(item)
        for pages, window in zip(request.pages, self.manager.windows, strict=True):
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, item.start + item.num_tokens):
                page, offset = self.place(pages, position)
                seen = self.device.get(page, {}).get(offset)
                own = position - item.start
                token = self.token(request, position) if own < 0 else tokens[own]
                wanted = (position, token)
                assert page > 0, f"{request.request_id} sees a page that was given back"
                assert seen == wanted, f"{request.request_id} sees {seen} instead of {wanted}"

    def token(self, request: Request, position: int) -> int:
        """A token of a request, even if a step in flight drew it and only the device knows it."""
        if position < request.num_tokens:
            return request.token_ids(position, position + 1)[0]
        owner, known = self.drawn[request.request_id]
        assert owner is request
        return known[position]

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
