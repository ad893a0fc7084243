"""Decides between steps which tokens of which requests run next. Plain Python: no jax.

Every step, whoever is decoding gets one token; prefill chunks then fill what is left of the token
and row budgets, so a long prompt never stalls a stream. Requests are served in the order of
(priority, arrival), lower first; nobody overtakes the head of the queue.

A request enters only when pages for all its tokens are free, and takes them at once. Taking pages
chunk by chunk would let half-prefilled prompts wait for each other's pages, or throw away each
other's work; this way only decoding grows, and what grows can preempt. One page for each running
request that may still grow is left free too, so that a newcomer is not thrown out again at once.
A decoding row that finds no page preempts the youngest running request, possibly itself, by
recomputation: its pages are freed, its output is kept, and it waits in its old place in the order.
So the oldest request is never preempted and advances every step, and whoever is running is finite;
a request that fills the pool, or the context, ends with "length".

`schedule` takes pages and notes what is in flight; all else about a request changes in `commit`.
One plan may be scheduled before the previous one is committed: planning uses upper bounds, and
commit drops the results of requests that have meanwhile ended or been preempted. Freed pages may
still be written by a step in flight; steps run in order on the device, so their next owner, whose
steps come later, overwrites them.

Invariants, after every call (`check_integrity`):
- a request is in exactly one place: waiting, running, or gone (FINISHED, no pages);
- both queues are in (priority, arrival) order; at most max_batch_rows requests run;
- a waiting request owns no pages and has nothing computed or in flight;
- every page in use is held by exactly the requests that list it; page lists are alike in all KV
  groups and cover every scheduled token;
- 0 <= num_computed <= scheduled <= tokens known or in flight - 1.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.core.buckets import prefill_budget
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import Committed, Limits, Plan, Scheduled
from jaxserve.engine.request import Request, Status
from jaxserve.errors import InvalidRequestError, QueueFullError


@dataclass(eq=False)
class _Entry:
    """A request in one of the queues, and what the steps in flight will have done to it."""

    request: Request
    order: tuple[int, float, int]
    scheduled: int = 0  # num_computed after the steps in flight
    draws: int = 0  # tokens the steps in flight will draw

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + self.draws

    @property
    def num_unscheduled(self) -> int:
        return self.num_tokens - self.scheduled


class Scheduler:
    """The waiting and the running queue over one page allocator. Not thread-safe, apart from
    `check_fits`."""

    def __init__(self, limits: Limits, allocator: PageAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        # The last token of a request needs no KV, so a full pool can still draw one.
        self._max_tokens = min(limits.max_model_len, allocator.capacity_tokens + 1)
        self._entries: dict[str, _Entry] = {}
        self._waiting: list[_Entry] = []
        self._running: list[_Entry] = []
        self._num_added = 0

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(entry.request for entry in self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(entry.request for entry in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    # ------------------------------------------------------------------ requests in and out

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequestError for a prompt that could never run, even alone."""
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt has no tokens; give at least one", "prompt")
        if num_prompt_tokens >= self.limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and the context length is "
                f"{self.limits.max_model_len} tokens of prompt and output together; shorten the "
                f"prompt to at most {self.limits.max_model_len - 1} tokens",
                "prompt",
            )
        pool = self.allocator
        if num_prompt_tokens > pool.capacity_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and the KV pool holds "
                f"{pool.capacity_tokens} ({pool.num_pages - 1} pages of {pool.page_size} tokens, "
                "one more is reserved); shorten the prompt or give the pool more memory",
                "prompt",
            )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises InvalidRequestError if it can never fit or its id is in use, QueueFullError if
        max_queue requests wait already. Nothing has changed then.
        """
        self.check_fits(request.num_tokens)
        if request.request_id in self._entries:
            raise InvalidRequestError(
                f"request id {request.request_id[:80]!r} is in use; choose another", "request_id"
            )
        if len(self._waiting) >= self.limits.max_queue:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, as many as max_queue allows; "
                "retry later"
            )
        order = (request.priority, request.arrival_time, self._num_added)
        self._num_added += 1
        entry = _Entry(request, order)
        self._entries[request.request_id] = entry
        request.status = Status.WAITING
        insort(self._waiting, entry, key=_order)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state and free its pages; None if it is not here (any more).

        Also how a row that failed alone ends: read its pages first if they need scrubbing.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        self._end(entry)
        return entry.request

    def finish(self, request_id: str, token_index: int) -> Request | None:
        """End a request late, because a stop string ended after output token token_index - 1.

        Keeps the first token_index output tokens; results still in flight are dropped.
        """
        request = self.abort(request_id)
        if request is not None:
            assert 0 <= token_index <= len(request.output_token_ids)
            del request.output_token_ids[token_index:]
        return request

    def preempt(self, request_id: str) -> Request | None:
        """Send a running request back to the queue, to be recomputed; None if it is not running."""
        entry = self._entries.get(request_id)
        if entry is None or entry.request.status is not Status.RUNNING:
            return None
        self._preempt(entry)
        return entry.request

    def preempt_all(self) -> tuple[Request, ...]:
        """Send everybody back, because the pool's content is lost. Plans in flight are void."""
        entries = tuple(self._running)
        for entry in entries:
            self._preempt(entry)
        return tuple(entry.request for entry in entries)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> Plan:
        """Plan the next step: decode first, then chunks of prompts already begun, then newcomers.

        Empty only when there is no work that could run: with nothing in flight, no work at all.
        """
        decode, preempted = self._schedule_decode()
        candidates = [entry for entry in self._running if entry.num_unscheduled > 1]
        if not preempted:  # the pages that freed are for those who decode
            candidates += self._admissible(self.limits.max_prefill_rows - len(candidates))
        chunk_limit = self.limits.max_chunk or self.limits.max_batch_tokens
        wanted = sum(
            min(entry.num_unscheduled, chunk_limit)
            for entry in candidates
            if entry.num_unscheduled > 1
        )
        budget = prefill_budget(
            self.limits.prefill_sizes, min(wanted, self.limits.max_batch_tokens)
        )
        prefill: list[Scheduled] = []
        for entry in candidates:
            size = min(entry.num_unscheduled, chunk_limit, budget)
            is_decode = entry.num_unscheduled == 1  # a prompt of one token
            if size == 0 and not is_decode:
                break
            if entry.request.status is Status.WAITING:
                self._admit(entry)
            if is_decode:
                decode.append(_take(entry, 1))
            else:
                prefill.append(_take(entry, size))
                budget -= size
        return Plan(tuple(decode), tuple(prefill), tuple(preempted))

    def commit(self, plan: Plan, tokens: Mapping[str, int]) -> list[Committed]:
        """Take in a step's result: `tokens` has the drawn token of each request that sampled.

        Plans are committed in the order they were scheduled. Requests that ended or were preempted
        since are dropped. Requests that finish here leave, and their pages are free.
        """
        committed = []
        for item in (*plan.decode, *plan.prefill):
            request = item.request
            entry = self._entries.get(request.request_id)
            if entry is None or entry.request is not request:
                continue
            if request.num_preemptions != item.epoch:
                continue
            assert item.start == request.num_computed, "plans must be committed in order"
            request.num_computed += item.num_tokens
            if not item.samples:
                continue
            entry.draws -= 1
            token = tokens[request.request_id]
            request.output_token_ids.append(token)
            finish_reason, stop_reason = self._finish_reason(request)
            if finish_reason is not None:
                self._end(entry)
            committed.append(Committed(request, token, finish_reason, stop_reason))
        return committed

    # ------------------------------------------------------------------ parts of a step

    def _schedule_decode(self) -> tuple[list[Scheduled], list[Request]]:
        decode: list[Scheduled] = []
        preempted: list[Request] = []
        for entry in tuple(self._running):  # oldest first: victims are never scheduled already
            if entry.request.status is not Status.RUNNING or entry.num_unscheduled != 1:
                continue
            if self._draws_its_last(entry):
                continue
            while not self._grow(entry):
                victim = self._running[-1]
                self._preempt(victim)
                preempted.append(victim.request)
                if victim is entry:
                    break
            else:
                decode.append(_take(entry, 1))
        return decode, preempted

    def _admissible(self, max_rows: int) -> list[_Entry]:
        """The first waiting requests that rows and pages allow to enter together."""
        max_rows = min(max_rows, self.limits.max_batch_rows - len(self._running))
        if max_rows <= 0 or not self._waiting:
            return []
        free = self.allocator.num_free - sum(map(self._may_grow, self._running))
        entries = []
        for entry in self._waiting[:max_rows]:
            free -= self.allocator.pages_for(entry.num_tokens)
            if free < 0:
                break
            entries.append(entry)
            free -= self._may_grow(entry)
        return entries

    def _admit(self, entry: _Entry) -> None:
        request = entry.request
        pages = self.allocator.allocate(self.allocator.pages_for(request.num_tokens))
        assert pages is not None, "a request was admitted without pages for it"
        request.pages = tuple(list(pages) for _ in range(self.allocator.num_groups))
        request.status = Status.RUNNING
        self._waiting.pop(_find(self._waiting, entry))
        insort(self._running, entry, key=_order)

    def _grow(self, entry: _Entry) -> bool:
        """Make sure that the next token has a slot; False if there is no page for it."""
        request = entry.request
        missing = self.allocator.pages_for(entry.scheduled + 1) - len(request.pages[0])
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        for group in request.pages:
            group.extend(pages)
        return True

    def _may_grow(self, entry: _Entry) -> bool:
        """Whether a request may come to need more pages than hold its tokens today."""
        request = entry.request
        longest = min(len(request.prompt_token_ids) + request.max_tokens, self._max_tokens)
        held = (
            len(request.pages[0]) if request.pages else self.allocator.pages_for(request.num_tokens)
        )
        return self.allocator.pages_for(longest - 1) > held

    def _draws_its_last(self, entry: _Entry) -> bool:
        """Whether a step in flight draws the last token the request may have."""
        num_output = len(entry.request.output_token_ids) + entry.draws
        return num_output >= entry.request.max_tokens or entry.num_tokens >= self._max_tokens

    def _finish_reason(self, request: Request) -> tuple[str | None, int | None]:
        """Why the newest token ends the request, if it does: (finish_reason, stop_reason)."""
        params = request.params
        num_output = len(request.output_token_ids)
        token = request.output_token_ids[-1]
        if num_output > params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if num_output >= request.max_tokens or request.num_tokens >= self._max_tokens:
            return "length", None
        return None, None

    def _preempt(self, entry: _Entry) -> None:
        request = entry.request
        self._running.pop(_find(self._running, entry))
        self._release_pages(request)
        request.num_computed = entry.scheduled = entry.draws = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        insort(self._waiting, entry, key=_order)

    def _end(self, entry: _Entry) -> None:
        request = entry.request
        queue = self._running if request.status is Status.RUNNING else self._waiting
        queue.pop(_find(queue, entry))
        del self._entries[request.request_id]
        self._release_pages(request)
        request.status = Status.FINISHED

    def _release_pages(self, request: Request) -> None:
        if request.pages:
            self.allocator.release(request.pages[0])
        request.pages = ()

    # ------------------------------------------------------------------ invariants

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants at the top of this file hold."""
        self.allocator.check_integrity()
        queued = self._waiting + self._running
        assert len(queued) == len(set(queued)) == len(self._entries), "a request is misplaced"
        assert len(self._running) <= self.limits.max_batch_rows, "too many requests run"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        for entry in queued:
            assert self._entries[entry.request.request_id] is entry, "a request is misplaced"
        for entry in self._waiting:
            request = entry.request
            assert request.status is Status.WAITING, f"{request.status} among the waiting"
            assert not request.pages, "a waiting request owns pages"
            assert request.num_computed == entry.scheduled == entry.draws == 0
        for entry in self._running:
            request = entry.request
            assert request.status is Status.RUNNING, f"{request.status} among the running"
            assert 0 <= request.num_computed <= entry.scheduled <= entry.num_tokens - 1
            assert request.num_computed <= request.num_tokens - 1
            assert len(request.pages) == self.allocator.num_groups
            assert all(group == request.pages[0] for group in request.pages)
            assert len(request.pages[0]) >= self.allocator.pages_for(entry.scheduled)
        held = Counter(page for entry in self._running for page in entry.request.pages[0])
        for page in range(1, self.allocator.num_pages):
            assert self.allocator.ref_count(page) == held[page], f"page {page} has a wrong owner"


def _order(entry: _Entry) -> tuple[int, float, int]:
    return entry.order


def _find(queue: list[_Entry], entry: _Entry) -> int:
    index = bisect_left(queue, entry.order, key=_order)
    assert queue[index] is entry, "a request is not in the queue its status names"
    return index


def _take(entry: _Entry, num_tokens: int) -> Scheduled:
    """Note that the next `num_tokens` tokens of the request are in flight."""
    start = entry.scheduled
    entry.scheduled += num_tokens
    samples = entry.scheduled == entry.num_tokens
    entry.draws += samples
    return Scheduled(entry.request, start, num_tokens, samples, entry.request.num_preemptions)
