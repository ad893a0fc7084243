"""Decides between steps which tokens of which requests run next. Plain Python: no jax.

Every step, whoever is decoding gets one token; prefill chunks then fill what is left of the token,
row and time budgets (step_times.py), so a long prompt never stalls a stream. Who enters next is
the waiting queue's business (waiting_queue.py); nobody overtakes the one whose turn it is.

A request enters only when its pages are free, and takes them at once, or in a windowed group those
of its first chunk; what the cache or a sibling has of it is shared and not computed again. Pages
for what the running may need next are left free too, so that a newcomer is not thrown out again at
once. A running row that finds no page preempts the youngest, possibly itself: its pages are
released, its output is kept, and it waits in its old place in the order. What it had computed stays
findable, in the pool or in host memory, until somebody needs the room, and is recomputed after
that. So the oldest request is never preempted and advances every step, and whoever is running is
finite; a request that fills the pool, or the context, ends with "length".

`schedule` takes pages and notes what is in flight; all else about a request changes in `commit`.
One plan may be scheduled before the previous one is committed: planning uses upper bounds, and
commit drops the results of requests that have meanwhile ended or been preempted. Released pages may
still be written by a step in flight; steps run in order on the device, so their next owner, whose
steps come later, overwrites them.

A plan may run several decode steps in a row (bursts.py), or verify drafts of a row's next tokens;
both only while no prompt runs and nobody can enter. Drafts never preempt anybody: they are dropped
where pages are short. How many of them hold is known only in `commit`, which gives back the pages
that the others took; so a plan with drafts is committed before the next one is scheduled.

Static batching, a baseline for benchmarks: requests enter only while nothing runs, or until the
batch that was formed then is complete.

Where requests are, how they move and the invariants of that: request_queues.py. Here, after every
call: at most max_batch_rows requests run. In a plan: nobody is in it twice; its rows and tokens
keep the limits; decode rows run the last known token, or the one that is being drawn; every token
that runs has its page; nobody who enters is in a plan that preempted somebody.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from jaxserve.core.buckets import prefill_budget
from jaxserve.engine.bursts import burst_steps, may_verify
from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.plan import Committed, Drafts, Limits, Plan, Scheduled
from jaxserve.engine.queue_entry import Entry
from jaxserve.engine.request import Request, Status
from jaxserve.engine.request_end import take_tokens
from jaxserve.engine.request_limits import check_prompt, longest_allowed
from jaxserve.engine.request_queues import RequestQueues
from jaxserve.engine.step_times import StepTimes
from jaxserve.errors import InvalidRequestError, QueueFullError


class Scheduler:
    """The waiting and the running requests over one KV manager. Not thread-safe, apart from
    `check_fits`.

    step_times: what the engine measures of its steps; None: nothing is known, and no step is
    kept short.
    """

    def __init__(
        self, limits: Limits, manager: KVManager, step_times: StepTimes | None = None
    ) -> None:
        self.limits = limits
        self.manager = manager
        self.step_times = step_times or StepTimes()
        # The last token of a request needs no KV, so a full pool can still draw one.
        self._max_tokens = min(limits.max_model_len, manager.capacity_tokens + 1)
        self._queues = RequestQueues(limits.policy, manager)
        self._waiting = self._queues.waiting
        self._running = self._queues.running
        self._deadlines = Deadlines()
        self._seats = 0  # static batching: requests that may still join the batch

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
        return bool(len(self._queues))

    @property
    def may_verify(self) -> bool:
        """Whether the next step may have drafts."""
        return may_verify(self._running, self.limits.max_batch_rows, len(self._waiting))

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Let a running request's pages cover so many tokens, if there are free ones."""
        entry = self._queues.get(request_id)
        if entry is None or entry.request.status is not Status.RUNNING:
            return False
        return self._has_room(entry, num_tokens)

    def find(self, request_id: str) -> Request | None:
        """The waiting or running request of this id; None if there is none."""
        entry = self._queues.get(request_id)
        return None if entry is None else entry.request

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequestError for a prompt that could never run, even alone."""
        check_prompt(num_prompt_tokens, self.limits.max_model_len, self.manager)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises InvalidRequestError if it can never fit or its id is in use, QueueFullError if
        max_queue requests wait already beside those that fill the rows. Nothing has changed then.
        """
        self._add(request, request.leader_id or request.request_id)

    def fork(self, parent_id: str, child: Request) -> None:
        """Queue a request that goes on from where another one is: `child` has its prompt and a
        copy of its output so far, whose pages they share.

        Raises InvalidRequestError if the parent is unknown or has ended, and as `add` does.
        """
        parent = self._queues.get(parent_id)
        if parent is None:
            raise InvalidRequestError(
                f"request {parent_id[:80]!r} cannot be forked: it is unknown or has ended; "
                "send its prompt and output as a new request",
                "request_id",
            )
        self._add(child, parent.family)

    def _add(self, request: Request, family: str) -> None:
        self.check_fits(request.num_tokens)
        if self._queues.get(request.request_id) is not None:
            raise InvalidRequestError(
                f"request id {request.request_id[:80]!r} is in use; choose another", "request_id"
            )
        limits = self.limits
        if len(self._queues) >= limits.max_batch_rows + limits.max_queue:  # free rows take some
            raise QueueFullError(
                f"{len(self._running)} requests are running and {len(self._waiting)} are waiting, "
                f"as many as max_queue ({limits.max_queue}) allows; retry later"
            )
        self._queues.add(request, family, longest_allowed(request, self._max_tokens))
        self._deadlines.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state and release its pages; None if it is not here (any more).

        Also how a row that failed alone ends; see `discard`.
        """
        entry = self._queues.get(request_id)
        if entry is None:
            return None
        self._queues.end(entry)
        return entry.request

    def discard(self, request_id: str) -> list[int]:
        """End a request whose KV is not to be trusted. Returns the pages to be cleaned: those that
        nobody else holds."""
        entry = self._queues.get(request_id)
        if entry is None:
            return []
        pages = self.manager.discard(entry.request)
        self._queues.end(entry)
        return pages

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed, in whatever state, and return them."""
        expired = self._deadlines.pop_expired(now)
        for request in expired:
            self.abort(request.request_id)
        return expired

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
        entry = self._queues.get(request_id)
        if entry is None or entry.request.status is not Status.RUNNING:
            return None
        self._queues.preempt(entry)
        return entry.request

    def preempt_all(self) -> tuple[Request, ...]:
        """Send everybody back, because the pool's content is lost. Plans in flight are void."""
        entries = tuple(self._running)
        for entry in entries:
            self._queues.preempt(entry)
        self.manager.clear()
        return tuple(entry.request for entry in entries)

    def schedule(self, drafts: Drafts | None = None) -> Plan:
        """Plan the next step: decode first, then chunks of prompts already begun, then newcomers.

        drafts: of requests whose last token is known; those that can be verified now are in the
        plan. Nothing runs in it only when nothing could: with nothing in flight, no work at all.
        """
        if (manager := self.manager).host_pages:
            manager.swap_is_cheaper = self.step_times.swap_is_cheaper(
                manager.page_size, manager.num_groups
            )
        preempted: list[Request] = []
        if not self.may_verify:
            drafts = None
        most = 1 if len(self._waiting) or drafts else self.limits.max_burst
        steps = burst_steps(
            self._running, most, self.limits.burst_rows, self.step_times, self._has_room
        )
        decode, prefilling = self._schedule_decode(steps, drafts or {}, preempted)
        tokens = self._prefill_tokens(len(decode), prefilling)
        prefilling = self._grow_prefill(prefilling, tokens, preempted)
        if preempted:  # the pages that freed are for those who run
            decode = [item for item in decode if item.request.status is Status.RUNNING]
        else:
            prefilling += self._admit(prefilling, tokens)
            tokens = min(tokens, self._prefill_tokens(len(decode), prefilling))
        prefill = self._schedule_prefill(prefilling, tokens, decode)
        transfers = manager.take_transfers()
        return Plan(tuple(decode), tuple(prefill), tuple(preempted), transfers, steps)

    def commit(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> list[Committed]:
        """Take in a step's result: `tokens` has the new tokens of each request that sampled.

        Plans are committed in the order they were scheduled. Requests that ended or were preempted
        since are dropped. Requests that finish here leave, and their pages are released.
        """
        committed = []
        get_entry = self._queues.get
        for item in chain(plan.decode, plan.prefill):
            request = item.request
            entry = get_entry(request.request_id)
            if entry is None or entry.request is not request:
                continue
            if request.num_preemptions != item.epoch:
                continue
            assert item.start == request.num_computed, "plans must be committed in order"
            if not item.samples:
                request.num_computed += item.num_tokens
                self.manager.commit(request)
                continue
            drawn = tokens[request.request_id]
            kept, reason, stop_reason = take_tokens(request, drawn, entry.longest)
            # What was drawn last is not computed yet, and neither is what follows a wrong draft.
            request.num_computed = request.num_tokens - 1
            if item.drafts:
                entry.take_back(item.num_tokens - len(drawn))
            self.manager.commit(request)
            self._queues.trim(entry)
            if reason is not None:
                self._queues.end(entry)
            committed.append(Committed(request, kept, reason, stop_reason))
        return committed

    def _schedule_decode(
        self, steps: int, drafts: Drafts, preempted: list[Request]
    ) -> tuple[list[Scheduled], list[Entry]]:
        """One token for everybody who decodes, with its drafts, and who is running prompts."""
        decode: list[Scheduled] = []
        prefilling: list[Entry] = []
        for entry in self._running.copy():  # oldest first: victims are never scheduled already
            length, request = entry.length, entry.request
            if preempted and request.status is not Status.RUNNING:
                continue
            if length - entry.scheduled > 1:
                prefilling.append(entry)
                continue
            if length == entry.longest:  # its last token is being drawn
                continue
            if length <= entry.room or self._make_room(entry, length, preempted):
                wanted = drafts.get(request.request_id, ())[: entry.longest - length - 1]
                if wanted and not self._has_room(entry, length + len(wanted)):
                    wanted = ()
                decode.append(entry.decode(steps, wanted))
        return decode, prefilling

    def _has_room(self, entry: Entry, num_tokens: int) -> bool:
        """Let a running request's lists cover num_tokens tokens if pages are free."""
        if num_tokens <= entry.room:
            return True
        if not self.manager.grow(entry.request, num_tokens):
            return False
        self._queues.note_room(entry)
        return True

    def _prefill_tokens(self, num_decode: int, prefilling: list[Entry]) -> int:
        """The most prefill tokens that the step may carry, as if all came after the longest
        context."""
        context = max((e.scheduled for e in prefilling if e.num_unscheduled > 1), default=0)
        most = self.step_times.prefill_limit(num_decode, self.limits.prefill_sizes, context)
        return min(most, self.limits.max_batch_tokens)

    def _grow_prefill(
        self, prefilling: list[Entry], tokens: int, preempted: list[Request]
    ) -> list[Entry]:
        """Make room for the next chunk of each prompt; those that have it, oldest first."""
        grown = []
        for entry in prefilling:
            if entry.request.status is not Status.RUNNING:
                continue
            size = min(entry.num_unscheduled, self._max_chunk, tokens)
            if self._make_room(entry, entry.scheduled + size, preempted):
                grown.append(entry)
                tokens -= size
        return grown

    def _schedule_prefill(
        self, prefilling: list[Entry], tokens: int, decode: list[Scheduled]
    ) -> list[Scheduled]:
        """Chunks of at most `tokens` tokens in all; prompts with one token left join `decode`."""
        max_chunk = self._max_chunk
        sizes = tuple(size for size in self.limits.prefill_sizes if size < tokens)
        wanted = sum(
            min(entry.num_unscheduled, max_chunk)
            for entry in prefilling
            if entry.num_unscheduled > 1
        )
        budget = prefill_budget((*sizes, tokens), min(wanted, tokens))
        prefill: list[Scheduled] = []
        for entry in prefilling:
            if entry.num_unscheduled == 1:
                decode.append(entry.take(1))
                continue
            size = min(entry.num_unscheduled, max_chunk, budget, entry.room - entry.scheduled)
            if size > 0 and len(prefill) < self.limits.max_prefill_rows:
                prefill.append(entry.take(size))
                budget -= size
        return prefill

    @property
    def _max_chunk(self) -> int:
        return self.limits.max_chunk or self.limits.max_batch_tokens

    def _make_room(self, entry: Entry, num_tokens: int, preempted: list[Request]) -> bool:
        """Let a running request's lists cover num_tokens tokens; False if it cannot run now."""
        if num_tokens <= entry.room:
            return True
        while not self.manager.grow(entry.request, num_tokens):
            victim = self._running[-1]
            if victim is self._running[0]:
                assert entry.is_in_flight, "the oldest request finds no pages"
                return False  # until the step in flight gives back what leaves a window
            self._queues.preempt(victim)
            preempted.append(victim.request)
            if victim is entry:
                return False
        self._queues.note_room(entry)
        return True

    def _admit(self, prefilling: list[Entry], tokens: int) -> list[Entry]:
        """Let the next requests in, as far as rows, pages and the step's tokens go."""
        limits, waiting = self.limits, self._waiting
        if not len(waiting):
            return []
        rows = limits.max_batch_rows - len(self._running)
        if limits.batching == "static":
            if not self._running:
                self._seats = min(rows, len(waiting))
            rows = min(rows, self._seats)
        prefill_rows = limits.max_prefill_rows - len(prefilling)
        tokens -= sum(min(entry.num_unscheduled, self._max_chunk) for entry in prefilling)
        entered: list[Entry] = []
        while len(entered) < rows:
            entry = waiting.next()
            if entry is None:
                break
            if (prefill_rows <= 0 or tokens <= 0) and self._queues.num_to_compute(entry) > 1:
                break  # a prompt with one token left takes a decode row
            if not self._queues.enter(entry):
                assert self._running, "a request that fits alone was refused"
                self._seats = len(entered)  # a static batch is as large as the pool allows
                break
            entered.append(entry)
            if entry.num_unscheduled > 1:
                prefill_rows -= 1
                tokens -= min(entry.num_unscheduled, self._max_chunk)
        if limits.batching == "static":
            self._seats -= len(entered)
        return entered

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants at the top of this file hold."""
        self._queues.check_integrity()
        assert len(self._running) <= self.limits.max_batch_rows, "too many requests run"
