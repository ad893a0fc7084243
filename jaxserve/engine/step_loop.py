"""The host loop: schedule, build, dispatch, commit.

Asynchronous, as it runs: a step is planned and dispatched while the one before it still runs, from
upper bounds; its last tokens never leave the device in between. Then the results of the one before
are fetched and committed, one step late. At most one step is in flight when `step` returns.
Synchronous, as the oracle of the tests: every step is committed before the next is planned. No
output depends on which.

A request that ends while a step runs it is dropped from that step's results. Whatever fails on the
device takes the donated pool with it: then both steps are void and every request is recomputed.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.core.buckets import Bucket, most_decode_rows, pick_bucket, prefill_sizes
from jaxserve.core.step_batch import Logprobs, SamplingBatch, StepBatch, StepOutput
from jaxserve.engine import prompt_logprobs
from jaxserve.engine.batch_builder import InDraw, build_batch, build_sampling, plan_rows
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.host_pages import HostPages, apply_transfers
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.penalty_slots import PenaltySlots, token_counts
from jaxserve.engine.plan import Committed, Plan, Scheduled, Transfers
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.request import Request, Status, TokenEvent
from jaxserve.engine.runner import Runner, StepHandle
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.speculator import Speculator
from jaxserve.engine.step_report import StepTimings, token_event
from jaxserve.errors import EngineDeadError

log = logging.getLogger(__name__)

# A request in a failed step is recomputed once. If a step with it fails again before it has got a
# token it is given up: counting failed steps in a row would not do, because others run in between,
# its own first chunks among them. If step after step fails, the fault is not the requests'.
_FAILURES_BEFORE_DEATH = 4


@dataclass(frozen=True)
class InFlight:
    """A dispatched step. rows: where in its output each request that draws a token is."""

    plan: Plan
    bucket: Bucket
    handle: StepHandle
    dispatched: float  # time.monotonic()
    follows: bool  # there was work when the step before it ended
    drafting: bool  # drafts were wanted for it
    rows: Mapping[str, InDraw]


class StepLoop:
    """Drives one scheduler and one runner. Every method is called from one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        host_pages: HostPages,
        shape: EngineShape,
        *,
        vocab_size: int,
        state_slots: int,
        asynchronous: bool,
        speculator: Speculator | None = None,
        on_step: Callable[[StepStats], None] | None,
    ) -> None:
        self.on_step = on_step
        self._scheduler = scheduler
        self._runner = runner
        self._host_pages = host_pages
        self._shape = shape
        self._vocab_size = vocab_size
        self._asynchronous = asynchronous
        self._speculator = speculator
        self._slots = PenaltySlots(state_slots)
        self._cache_stats = scheduler.manager.stats
        self._buckets: tuple[Bucket, ...] = ()  # those the scheduler plans for
        self._in_flight: InFlight | None = None
        self._events: list[TokenEvent] = []
        self._unreported = False  # something ended silently: the statistics must say so
        self._failures = 0  # in a row
        self._failed_at: dict[Request, int] = {}  # output tokens it had when its step failed last
        # time.monotonic() of the newest result; from when on the device had nothing to do.
        self._last_result = 0.0
        self._idle_since: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        waiting = self._in_flight is not None or bool(self._events) or self._unreported
        return waiting or self._scheduler.has_work

    @property
    def speculation(self) -> SpeculationStats | None:
        """What came of drafts since the start."""
        return None if self._speculator is None else self._speculator.stats.copy()

    def report(self, event: TokenEvent) -> None:
        """Let the next step return this event too."""
        self._events.append(event)

    def report_silent_end(self) -> None:
        """A request ended without an event; the next step tells the new statistics."""
        self._unreported = True

    def step(self) -> list[TokenEvent]:
        """Dispatch one step, commit the one before it (or this one, if synchronous), and return
        what is new. Raises EngineDeadError if steps keep failing."""
        timings = StepTimings()
        self._use_ready_buckets()
        previous, self._in_flight = self._in_flight, None
        if previous is not None and previous.handle.is_ready:
            self._idle_since = self._last_result  # at the earliest
        follows = previous is not None
        speculator = self._speculator
        if (
            speculator is not None
            and previous is not None
            and speculator.waits_for(previous.plan, self._scheduler, self._buckets)
        ):
            self._finish(previous, timings)
            previous = None
        self._expire(timings.began)
        drafts = None
        if speculator is not None and previous is None:
            drafts = speculator.propose(self._scheduler, self._buckets)
        plan = self._scheduler.schedule(drafts)
        timings.on_plan(plan)
        failure: Exception | None = None
        if not plan.is_empty or not plan.transfers.is_empty:
            try:
                self.move_pages(plan.transfers)
                if not plan.is_empty:
                    launched = self._launch(plan, previous)
                    self._in_flight = replace(
                        launched, follows=follows, drafting=drafts is not None
                    )
                    timings.bucket = self._in_flight.bucket.name
                    timings.device_idle_seconds = self._idle_seconds(previous, timings.began)
            except Exception as error:  # whatever XLA raises: the donated pool is lost either way
                failure = error
        if previous is not None and not self._finish(previous, timings):
            failure = None  # it followed from that one, and everything is recomputed already
        if failure is not None:
            self.recover(plan, failure)
        if not self._asynchronous and self._in_flight is not None:
            launched, self._in_flight = self._in_flight, None
            self._finish(launched, timings)
        return self._report(plan, timings)

    def drain(self) -> None:
        """Wait for the step in flight, if any, and commit it; `step` returns its events."""
        if self._in_flight is not None:
            previous, self._in_flight = self._in_flight, None
            self._finish(previous, StepTimings())

    # ------------------------------------------------------------------ parts of a step

    def _idle_seconds(self, previous: InFlight | None, began: float) -> float:
        """At most how long the device has waited for the step that was dispatched now."""
        since, self._idle_since = self._idle_since, None
        if since is None and previous is not None and previous.handle.is_ready:
            since = began
        return 0.0 if since is None else time.monotonic() - since

    def _use_ready_buckets(self) -> None:
        """Have the scheduler plan for the buckets that are loaded by now."""
        buckets = self._runner.buckets
        if buckets is not self._buckets:
            self._buckets = buckets
            limits = self._scheduler.limits
            self._scheduler.limits = replace(
                limits, prefill_sizes=prefill_sizes(buckets), burst_rows=most_decode_rows(buckets)
            )

    def _expire(self, now: float) -> None:
        """End the requests that have run out of time."""
        for request in self._scheduler.expire(now):
            self._events.append(TokenEvent(request.request_id, (), None, "timeout"))

    def move_pages(self, transfers: Transfers) -> None:
        """What the scheduler wants to be in its place before the step."""
        if not transfers.is_empty:
            moved, seconds = apply_transfers(self._runner, self._host_pages, transfers)
            self._scheduler.step_times.observe_copy(moved, seconds)

    def _launch(self, plan: Plan, previous: InFlight | None) -> InFlight:
        bucket = pick_bucket(
            self._buckets,
            len(plan.decode),
            len(plan.prefill),
            plan.num_prefill_tokens,
            plan.width,
        )
        self._prepare_counts(plan)
        batch, sampling = self.inputs(plan, bucket, None if previous is None else previous.rows)
        targets = prompt_logprobs.build_targets(plan, bucket.prefill_tokens)
        handle = self._runner.dispatch(bucket, batch, sampling, targets, plan.steps)
        rows = {
            item.request.request_id: InDraw(row, plan.steps + len(item.drafts))
            for row, item in plan_rows(plan, bucket)
            if item.samples
        }
        return InFlight(plan, bucket, handle, time.monotonic(), False, False, rows)

    def inputs(
        self, plan: Plan, bucket: Bucket, previous_rows: Mapping[str, InDraw] | None = None
    ) -> tuple[StepBatch, SamplingBatch]:
        """The arrays of a step; of an empty plan, those that warm-up compiles for."""
        batch = build_batch(
            plan,
            bucket,
            num_groups=self._shape.num_groups,
            pages_per_row=self._shape.pages_per_row,
            page_size=self._shape.page_size,
            previous_rows=previous_rows,
        )
        return batch, build_sampling(plan, bucket)

    def _prepare_counts(self, plan: Plan) -> None:
        """Give every row that samples with penalties its token counts on the device.

        A row gets its slot before its first draw, so no token of it is in flight then.
        """
        self._slots.release_unneeded(self._scheduler.running)
        for item in (*plan.decode, *plan.prefill):
            request = item.request
            if item.samples and request.params.uses_penalties and not request.sampling_slot:
                slot = self._slots.assign(request)
                self._runner.set_counts(slot, *token_counts(request, self._vocab_size))

    def _finish(self, step: InFlight, timings: StepTimings) -> bool:
        """Wait for a step and commit it, or recover if it failed; whether it went well."""
        waiting = time.monotonic()
        try:
            output = step.handle.result()
            scores = step.handle.prompt_logprobs()
            now = time.monotonic()
            if self._speculator is not None:
                self._speculator.audit(step.plan, output, step.rows, self._buckets)
        except Exception as error:  # whatever XLA raises
            self.recover(step.plan, error)
            return False
        ended = time.monotonic()  # of an audit, which counts as no step
        seconds = now - max(step.dispatched, self._last_result)
        since_last = now - (self._last_result if step.follows else step.dispatched)
        timings.on_result(ended - waiting, seconds)
        if scores is None and step.plan.width == 1:  # others take longer than their shape tells
            self._scheduler.step_times.observe(
                len(step.plan.decode),
                step.bucket.prefill_tokens if step.plan.prefill else 0,
                seconds / step.plan.steps,
                step.plan.num_prefill_pairs,
            )
        self._last_result = ended
        if self._in_flight is None:
            self._idle_since = ended
        self._failures = 0
        timings.on_commit(self._commit(step, output, scores))
        if self._speculator is not None and not step.plan.prefill:
            self._speculator.observe(
                step.plan, output, step.rows, step.bucket, since_last, drafting=step.drafting
            )
        return True

    def _commit(
        self, step: InFlight, output: StepOutput, scores: Logprobs | None
    ) -> list[Committed]:
        """Hand a step's tokens to the scheduler and note the events."""
        for item in (*step.plan.decode, *step.plan.prefill):
            if item.samples and not output.ok[step.rows[item.request.request_id].row]:
                self._fail_row(item)
        if scores is not None:
            self._keep_prompt_logprobs(step.plan, scores)
        drawn, accepted = np.asarray(output.tokens).tolist(), output.num_accepted
        tokens = {
            name: drawn[row][: int(accepted[row]) + 1] for name, (row, _) in step.rows.items()
        }
        committed = self._scheduler.commit(step.plan, tokens)
        self._events += [
            token_event(news, output, step.rows[news.request.request_id].row) for news in committed
        ]
        return committed

    def _keep_prompt_logprobs(self, plan: Plan, scores: Logprobs) -> None:
        for item, part in prompt_logprobs.found_in(plan, scores):
            if not self._is_here(item):
                continue
            if np.isnan(part.logprobs).any():
                self._fail_row(item)
            else:
                prompt_logprobs.keep(item.request, part)

    # ------------------------------------------------------------------ failures

    def recover(self, plan: Plan, error: Exception) -> None:
        """Rebuild the pool and let every request be recomputed from its tokens.

        plan: what could not be run; empty if no step did it. Raises EngineDeadError if steps keep
        failing.
        """
        self._failures += 1
        log.exception(
            "step failed (%d in a row); recomputing all requests", self._failures, exc_info=error
        )
        if self._failures >= _FAILURES_BEFORE_DEATH:
            raise EngineDeadError(f"{self._failures} steps in a row failed: {error}") from error
        self._failed_at = {
            request: number
            for request, number in self._failed_at.items()
            if request.status is not Status.FINISHED
        }
        for item in (*plan.decode, *plan.prefill):
            self._suspect(item, f"the step failed twice: {type(error).__name__}")
        if self._in_flight is not None:  # it used what the failed step left
            with suppress(Exception):  # only its end matters: it reads our arrays until then
                self._in_flight.handle.result()
            self._in_flight = None
        self._scheduler.preempt_all()
        self._host_pages.clear()
        self._slots.release_all()
        self._runner.reset()

    def _suspect(self, item: Scheduled, why: str) -> None:
        """Note that a request was in a failed step; end it if it was before and got no token since,
        unless it has ended or been sent back anyway."""
        request = item.request
        if not self._is_here(item):
            return
        num_output = len(request.output_token_ids)
        if self._failed_at.get(request) == num_output:
            self._scheduler.abort(request.request_id)
            self._report_error(request, why)
        else:
            self._failed_at[request] = num_output

    def _fail_row(self, item: Scheduled) -> None:
        """A row whose logits are NaN fails alone; its pages are cleaned before anyone gets them."""
        if self._is_here(item):
            self._runner.scrub(self._scheduler.discard(item.request.request_id))
            why = "the model's logits are not numbers (NaN) for this request"
            self._report_error(item.request, why)

    def _is_here(self, item: Scheduled) -> bool:
        request = item.request
        return request.status is not Status.FINISHED and request.num_preemptions == item.epoch

    def _report_error(self, request: Request, why: str) -> None:
        self._events.append(TokenEvent(request.request_id, (), None, "error", error=why))

    # ------------------------------------------------------------------ reports

    def _report(self, plan: Plan, timings: StepTimings) -> list[TokenEvent]:
        events, self._events = self._events, []
        self._unreported = False
        if not self.has_work:  # what comes now is rest, not idling
            self._idle_since = None
        if self.on_step is not None:
            self.on_step(self._stats(plan, timings))
        return events

    def _stats(self, plan: Plan, timings: StepTimings) -> StepStats:
        manager = self._scheduler.manager
        before, self._cache_stats = self._cache_stats, manager.stats
        now = self._cache_stats
        return StepStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            pages_used=manager.num_used,
            pages_total=manager.num_pages - 1,
            prompt_tokens=timings.prompt_tokens,
            output_tokens=timings.output_tokens,
            step_tokens=plan.num_tokens,
            num_preemptions=len(plan.preempted),
            host_seconds=timings.host_seconds,
            device_seconds=timings.device_seconds,
            device_idle_seconds=timings.device_idle_seconds,
            bucket=timings.bucket,
            late_compiles=self._runner.late_compiles,
            queue_seconds=tuple(timings.queue_seconds),
            prefill_seconds=tuple(timings.prefill_seconds),
            prefix_queried_tokens=now.queried_tokens - before.queried_tokens,
            prefix_hit_tokens=now.hit_tokens - before.hit_tokens,
            kv_waste_tokens=manager.unused_places(self._scheduler.running),
            pages_cached=now.cached_pages,
            pages_stored=now.stored_pages - before.stored_pages,
            pages_loaded=now.loaded_pages - before.loaded_pages,
            speculation=None if self._speculator is None else self._speculator.take_stats(),
        )
