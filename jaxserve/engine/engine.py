"""One model, one KV pool, one loop: what the engine offers to those who own its thread.

Knows token ids only; text lives elsewhere. Every method is called from one thread, except
`check_admissible`, which reads nothing that changes.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core.backends import make_ops
from jaxserve.core.buckets import Bucket
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.mesh import make_mesh
from jaxserve.core.ops import Ops
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.core.step_batch import SamplingBatch, StepBatch
from jaxserve.engine.backend_settings import settle_backend
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.draft_audit import DraftAuditor
from jaxserve.engine.engine_shape import EngineShape, engine_shape, resolve_kv_dtype
from jaxserve.engine.fit_memory import fit_to_device
from jaxserve.engine.host_pages import HostPages, slots_in
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.plan import Plan
from jaxserve.engine.programs import Programs
from jaxserve.engine.proposers.device_proposer import DeviceProposer, Drafter
from jaxserve.engine.proposers.draft_checks import (
    Draft,
    check_draft_model,
    check_kernels,
    draft_kv_spec,
    whole_table,
)
from jaxserve.engine.proposers.draft_model import DraftModel
from jaxserve.engine.proposers.make_heads import make_heads
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.request import Request, TokenEvent
from jaxserve.engine.request_states import RequestStates
from jaxserve.engine.runner import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.speculator import make_speculator
from jaxserve.engine.step_loop import StepLoop
from jaxserve.engine.step_times import StepTimes
from jaxserve.engine.target_features import target_features
from jaxserve.engine.warm_up import WarmUp
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.contract import check_contract
from jaxserve.models.registry import is_built_in


class Engine:
    """One model, one KV pool, one loop."""

    _warm_up: WarmUp | None

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        on_step: Callable[[StepStats], None] | None = None,
        max_chunk: int | None = None,
        devices: Sequence[jax.Device] | None = None,
        loader: ProgramLoader | None = None,
        asynchronous: bool = True,
        draft: Draft | None = None,
    ) -> None:
        """draft: the model or the heads that the method of speculation needs (`load_draft`).
        max_chunk forces short prefill chunks, in tests: no output depends on it.

        devices: split the model over these; None: the first device alone. loader: where programs
        come from; None: they are traced, and compiled or taken from JAX's cache. asynchronous: how
        the loop runs (see `StepLoop`); no output depends on it.
        Raises ModelLoadError if the model breaks its contract, InvalidRequestError if the pool
        cannot hold two tokens.
        """
        kv_spec, mesh = model.model.kv_spec(model.config), make_mesh(devices)
        config = settle_backend(config, kv_spec, mesh.devices.flat[0])
        ops = make_ops(config.attention_backend, kv_spec, mesh.size)
        self._loader = loader or ProgramLoader()
        features = target_features(draft, model, ops, resolve_kv_dtype(config))
        config = fit_to_device(model, config, kv_spec, ops, mesh, self._loader, draft, features)
        draft_spec = None if draft is None else draft_kv_spec(draft)
        shape = engine_shape(model, config, kv_spec, max_chunk, draft_spec, features)
        if not is_built_in(model.model):  # those are checked by our tests
            check_contract(model.model, model.config, ops, shape.dtype.name)
        slots, audit_slots = config.max_batch_rows + 1, int(config.speculative_audit > 0)
        host_slots, self._host_bytes = _host_tier(config, kv_spec, shape)
        self.kv_manager = _make_manager(config, kv_spec, shape, host_slots)
        self.scheduler = Scheduler(shape.limits, self.kv_manager, StepTimes(config.max_stall))
        all_slots = slots + audit_slots
        self.runner = _make_runner(model, ops, kv_spec, shape, mesh, self._loader, all_slots)
        self.shape, self.page_size = shape, shape.page_size
        self.capacity_tokens = self.kv_manager.capacity_tokens
        # A request's last token needs no page.
        self.max_model_len = min(shape.max_model_len, self.capacity_tokens + 1)
        self.bucket_table, self._warm_up = shape.buckets, None
        self._draft = self._make_draft(draft, model, ops, config, mesh)
        self._loop = StepLoop(
            self.scheduler,
            self.runner,
            HostPages(host_slots, self.runner.pool),
            shape,
            vocab_size=model.vocab_size,
            state_slots=slots,
            asynchronous=asynchronous,
            speculator=make_speculator(
                config.speculative,
                shape.buckets,
                self._draft,
                self._make_auditor(config, slots, model.vocab_size),
            ),
            on_step=on_step,
        )
        self.states = RequestStates(model, self.scheduler, self._loop, self.runner, ops.name)

    def _make_draft(
        self, draft: Draft | None, model: LoadedModel, ops: Ops, config: EngineConfig, mesh: Mesh
    ) -> DeviceProposer | None:
        if draft is None or config.speculative is None:
            return None
        shape, spec = self.shape, draft_kv_spec(draft)
        table = whole_table(model, model.model.kv_spec(model.config))
        own_ops = ops
        if spec is not None:
            check_kernels(draft, spec, ops.name, shape)
            own_ops = make_ops(config.attention_backend, spec, mesh.size)
        drafter: Drafter
        if isinstance(draft, LoadedModel):
            assert spec is not None, "a model without keys and values"
            check_draft_model(draft, model, self.max_model_len)
            runner = _make_runner(draft, own_ops, spec, shape, mesh, self._loader, 1)
            drafter = DraftModel(runner, shape)
        else:
            most = config.speculative.num_speculative_tokens
            both = (ops, own_ops)
            drafter = make_heads(draft, model, self.runner, both, shape, mesh, self._loader, most)
        return DeviceProposer(drafter, table, self.scheduler.reserve)

    def _make_auditor(
        self, config: EngineConfig, slot: int, vocab_size: int
    ) -> DraftAuditor | None:
        if not config.speculative_audit:
            return None
        return DraftAuditor(
            self.runner,
            self.shape,
            share=config.speculative_audit,
            seed=config.seed,
            slot=slot,
            vocab_size=vocab_size,
        )

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
            self.runner,
            self._loader,
            self.bucket_table,
            self._empty_inputs,
            progress,
            host_tier=self._host_bytes,
            load_more=None if self._draft is None else self._draft.load,
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

    @property
    def speculation(self) -> SpeculationStats | None:
        """What came of drafts since the start; None: the engine does not speculate."""
        return self._loop.speculation

    def observe(self, on_step: Callable[[StepStats], None]) -> None:
        """Hand every further step's StepStats to `on_step`, on the engine's thread."""
        self._loop.on_step = on_step

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
            self._loop.report(TokenEvent(request_id, (), None, "abort"))

    def finish(self, request_id: str, token_index: int) -> None:
        """A stop string was found late: the output ends after token_index tokens, silently."""
        self.scheduler.finish(request_id, token_index)
        self._loop.report_silent_end()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self._loop.has_work

    def step(self) -> list[TokenEvent]:
        """Run one step and return what is new. Raises EngineDeadError if steps keep failing."""
        return self._loop.step()

    def _empty_inputs(self, bucket: Bucket) -> tuple[StepBatch, SamplingBatch]:
        return self._loop.inputs(Plan(), bucket)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the host side is broken. For tests."""
        self.scheduler.check_integrity()


def _host_tier(config: EngineConfig, kv_spec: KVSpec, shape: EngineShape) -> tuple[int, int]:
    """Pages that kv_host_memory has room for, and their bytes."""
    page_bytes = shape.page_bytes(kv_layout(kv_spec))
    slots = slots_in(config.kv_host_memory, page_bytes)
    return slots, slots * page_bytes


def _make_runner(
    model: LoadedModel,
    ops: Ops,
    kv_spec: KVSpec,
    shape: EngineShape,
    mesh: Mesh,
    loader: ProgramLoader,
    state_slots: int,
) -> Runner:
    """Of the target, or of a draft model that runs the target's shapes."""
    programs = Programs(
        model.model,
        model.config,
        ops,
        vocab_size=model.vocab_size,
        page_size=shape.page_size,
        max_rows=shape.max_rows,
        max_steps=MAX_BURST,
        max_draws=shape.max_draws,
        mesh=mesh,
        features=shape.features,
    )
    return Runner(
        programs,
        model.params,
        kv_spec,
        loader,
        num_pages=shape.pool_pages,
        dtype=shape.kv_dtype,
        state_slots=state_slots,
        pages_per_row=shape.pages_per_row,
    )


def _make_manager(
    config: EngineConfig, kv_spec: KVSpec, shape: EngineShape, host_slots: int
) -> KVManager:
    return KVManager(
        shape.num_pages,
        shape.page_size,
        kv_layout(kv_spec).windows,
        max_chunk=shape.limits.max_chunk or shape.limits.max_batch_tokens,
        prefix_cache=config.prefix_cache,
        host_pages=host_slots,
        kind=shape.kv_dtype.name,
    )
