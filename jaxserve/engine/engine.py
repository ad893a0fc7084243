"""The host loop: schedule, build, dispatch, commit, one step at a time.

Knows token ids only; text lives elsewhere. Every method is called from one thread, except
`check_admissible`, which reads nothing that changes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jaxserve.config import EngineConfig
from jaxserve.core.backends import make_ops
from jaxserve.core.buckets import Bucket, pick_bucket, prefill_sizes
from jaxserve.core.mesh import make_mesh
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.core.step_batch import SamplingBatch, StepBatch, StepOutput
from jaxserve.engine.batch_builder import build_batch, build_sampling, plan_rows
from jaxserve.engine.engine_shape import engine_shape
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.penalty_slots import PenaltySlots, token_counts
from jaxserve.engine.plan import Committed, Plan, Scheduled
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import Request, TokenEvent
from jaxserve.engine.runner import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.step_report import StepTimings, token_event
from jaxserve.engine.warm_up import WarmUp
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.contract import check_contract
from jaxserve.models.registry import is_built_in

log = logging.getLogger(__name__)

WIDTH = 1  # tokens a decode row owns
# A failed step is repeated once; if it fails again its requests are given up, and if steps go on
# failing with other requests in them the fault is not theirs.
_FAILURES_BEFORE_GIVING_UP_REQUESTS = 2
_FAILURES_BEFORE_DEATH = 4


class Engine:
    """One model, one KV pool, one loop."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        on_step: Callable[[StepStats], None] | None = None,
        max_chunk: int | None = None,
        devices: Sequence[jax.Device] | None = None,
        loader: ProgramLoader | None = None,
    ) -> None:
        """max_chunk forces short prefill chunks, in tests: no output depends on it.

        devices: split the model over these; None: the first device alone. loader: where programs
        come from; None: they are traced, and compiled or taken from JAX's cache.
        Raises ModelLoadError if the model breaks its contract, InvalidRequestError if the pool
        cannot hold two tokens.
        """
        kv_spec = model.model.kv_spec(model.config)
        ops = make_ops(config.attention_backend, kv_spec)
        shape = engine_shape(model, config, kv_spec, max_chunk)
        if not is_built_in(model.model):  # those are checked by our tests
            check_contract(model.model, model.config, ops, shape.dtype.name)
        programs = Programs(
            model.model,
            model.config,
            ops,
            vocab_size=model.vocab_size,
            page_size=shape.page_size,
            max_rows=shape.max_rows,
            mesh=make_mesh(devices),
        )
        state_slots = config.max_batch_rows + 1
        self.allocator = PageAllocator(shape.num_pages, shape.page_size, shape.num_groups)
        self.scheduler = Scheduler(shape.limits, self.allocator)
        self._loader = loader or ProgramLoader()
        self.runner = Runner(
            programs,
            model.params,
            kv_spec,
            self._loader,
            num_pages=shape.num_pages,
            dtype=shape.kv_dtype,
            width=WIDTH,
            state_slots=state_slots,
            pages_per_row=shape.pages_per_row,
        )
        self.shape = shape
        self.page_size = shape.page_size
        self.capacity_tokens = self.allocator.capacity_tokens
        # The last token of a request needs no KV. A pool smaller than the context limits it.
        self.max_model_len = min(shape.max_model_len, self.capacity_tokens + 1)
        self.bucket_table = shape.buckets
        self._buckets: tuple[Bucket, ...] = ()  # those the scheduler plans for
        self._warm_up: WarmUp | None = None
        self._model = model
        self._slots = PenaltySlots(state_slots)
        self._on_step = on_step
        self._events: list[TokenEvent] = []
        self._unreported = False  # a late finish changed what the statistics say
        self._failures = 0

    def warm_up(
        self, progress: Callable[[str], None] | None = None, *, wait_for_all: bool = True
    ) -> None:
        """Load every bucket. After this nothing compiles any more.

        wait_for_all False: return as soon as one bucket is loaded that serves everything. The
        others follow on a thread of their own, and until they are there steps are padded to what
        is, so some outputs may differ in the last bits on backends whose rows depend on the shape.
        """
        assert self._warm_up is None, "an engine is warmed up once"
        self._warm_up = WarmUp(
            self.runner, self._loader, self.bucket_table, self._empty_inputs, progress
        )
        if wait_for_all:
            self._warm_up.load_all()
        else:
            self._warm_up.load_smallest()

    def close(self) -> None:
        """Stop what a warm-up still does beside the engine's thread, as soon as it can."""
        if self._warm_up is not None:
            self._warm_up.close()

    @property
    def ready_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that steps can be padded to by now. Thread-safe."""
        return self.runner.buckets

    def observe(self, on_step: Callable[[StepStats], None]) -> None:
        """Hand every further step's StepStats to `on_step`, on the engine's thread."""
        self._on_step = on_step

    # ------------------------------------------------------------------ requests

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The request's max_tokens, resolved: None means all that the context has left.

        Raises InvalidRequestError for what could never fit; nothing is cut silently. Thread-safe.
        """
        self.scheduler.check_fits(num_prompt_tokens)
        room = self.max_model_len - num_prompt_tokens
        if max_tokens is None:
            return room
        if max_tokens > room:
            pool = self.max_model_len < self.shape.max_model_len
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, "
                f"together {num_prompt_tokens + max_tokens}; the context length is "
                f"{self.max_model_len}{' (what the KV pool holds)' if pool else ''}. "
                f"Shorten the prompt or ask for at most {room} tokens",
                "max_tokens",
            )
        return max_tokens

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError; then nothing changed."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request in any state; the next step reports it. An unknown id is no error."""
        if self.scheduler.abort(request_id) is not None:
            self._events.append(TokenEvent(request_id, (), None, "abort"))

    def finish(self, request_id: str, token_index: int) -> None:
        """A stop string was found late: the output ends after token_index tokens, silently."""
        self.scheduler.finish(request_id, token_index)
        self._unreported = True

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self.scheduler.has_work or bool(self._events) or self._unreported

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[TokenEvent]:
        """Run one step and return what is new. Raises EngineDeadError if steps keep failing."""
        timings = StepTimings()
        buckets = self._use_ready_buckets()
        plan = self.scheduler.schedule()
        timings.on_plan(plan)
        if not plan.is_empty:
            bucket = pick_bucket(
                buckets, len(plan.decode), len(plan.prefill), plan.num_prefill_tokens
            )
            self._prepare_counts(plan)
            batch, sampling = self._inputs(plan, bucket)
            dispatched = time.monotonic()
            output = self._run(plan, bucket, batch, sampling)
            timings.device_seconds = time.monotonic() - dispatched
            timings.bucket = bucket.name
            if output is not None:
                timings.on_commit(self._commit(plan, bucket, output))
        events, self._events = self._events, []
        self._unreported = False
        if self._on_step is not None:
            self._on_step(self._stats(plan, timings))
        return events

    def _use_ready_buckets(self) -> tuple[Bucket, ...]:
        """The buckets loaded by now, which the scheduler is told to plan for."""
        buckets = self.runner.buckets
        if buckets is not self._buckets:
            self._buckets = buckets
            limits = self.scheduler.limits
            self.scheduler.limits = replace(limits, prefill_sizes=prefill_sizes(buckets))
        return buckets

    def _prepare_counts(self, plan: Plan) -> None:
        """Give every row that samples with penalties its token counts on the device."""
        self._slots.release_unneeded(self.scheduler.running)
        for item in (*plan.decode, *plan.prefill):
            request = item.request
            if item.samples and request.params.uses_penalties and not request.sampling_slot:
                slot = self._slots.assign(request)
                self.runner.set_counts(slot, *token_counts(request, self._model.vocab_size))

    def _run(
        self, plan: Plan, bucket: Bucket, batch: StepBatch, sampling: SamplingBatch
    ) -> StepOutput | None:
        """The step's result, or None if it failed and was recovered from."""
        try:
            output = self.runner.dispatch(bucket, batch, sampling).result()
        except Exception as error:  # whatever XLA raises: the donated pool is lost either way
            self._recover(plan, error)
            return None
        self._failures = 0
        return output

    def _recover(self, plan: Plan, error: Exception) -> None:
        """Rebuild the pool and let every request be recomputed from its tokens."""
        self._failures += 1
        log.exception("step failed (%d in a row); recomputing all requests", self._failures)
        if self._failures >= _FAILURES_BEFORE_DEATH:
            raise EngineDeadError(f"{self._failures} steps in a row failed: {error}") from error
        if self._failures >= _FAILURES_BEFORE_GIVING_UP_REQUESTS:
            for item in (*plan.decode, *plan.prefill):
                self._fail(item, f"the step failed twice: {type(error).__name__}")
        self.scheduler.preempt_all()
        self._slots.release_all()
        self.runner.reset()

    def _fail(self, item: Scheduled, why: str) -> None:
        request_id = item.request.request_id
        if self.scheduler.abort(request_id) is not None:
            self._events.append(TokenEvent(request_id, (), None, "error", error=why))

    def _commit(self, plan: Plan, bucket: Bucket, output: StepOutput) -> list[Committed]:
        """Hand the step's tokens to the scheduler and note the events."""
        rows = [(row, item) for row, item in plan_rows(plan, bucket) if item.samples]
        for row, item in rows:
            if not output.ok[row]:
                self._fail_row(item)
        row_of = {item.request.request_id: row for row, item in rows}
        tokens = {name: int(output.tokens[row, 0]) for name, row in row_of.items()}
        committed = self.scheduler.commit(plan, tokens)
        self._events += [
            token_event(news, output, row_of[news.request.request_id]) for news in committed
        ]
        return committed

    def _fail_row(self, item: Scheduled) -> None:
        """A row whose logits are NaN fails alone; its pages are cleaned before anyone gets them."""
        pages = list(item.request.pages[0]) if item.request.pages else []
        self._fail(item, "the model's logits are not numbers (NaN) for this request")
        self.runner.scrub(pages)

    # ------------------------------------------------------------------ inputs and reports

    def _inputs(self, plan: Plan, bucket: Bucket) -> tuple[StepBatch, SamplingBatch]:
        batch = build_batch(
            plan,
            bucket,
            num_groups=self.shape.num_groups,
            pages_per_row=self.shape.pages_per_row,
            page_size=self.shape.page_size,
        )
        return batch, build_sampling(plan, bucket)

    def _empty_inputs(self, bucket: Bucket) -> tuple[StepBatch, SamplingBatch]:
        return self._inputs(Plan(), bucket)

    def _stats(self, plan: Plan, timings: StepTimings) -> StepStats:
        return StepStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            pages_used=self.allocator.num_used,
            pages_total=self.allocator.num_pages - 1,
            prompt_tokens=timings.prompt_tokens,
            output_tokens=timings.output_tokens,
            step_tokens=len(plan.decode) + plan.num_prefill_tokens,
            num_preemptions=len(plan.preempted),
            host_seconds=timings.host_seconds,
            device_seconds=timings.device_seconds,
            bucket=timings.bucket,
            late_compiles=self.runner.late_compiles,
            queue_seconds=tuple(timings.queue_seconds),
            prefill_seconds=tuple(timings.prefill_seconds),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the host side is broken. For tests."""
        self.scheduler.check_integrity()
