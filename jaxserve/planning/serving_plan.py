"""The plan of an engine: what fits on a device, and how fast it can be at best."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxserve.config import DEFAULT_KV_MEMORY, EngineConfig
from jaxserve.core.buckets import Bucket, largest_bucket
from jaxserve.core.kv_layout import KVLayout, kv_layout
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.program_memory import tree_bytes
from jaxserve.engine.engine_shape import EngineShape, engine_shape
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.memory_plan import MemoryPlan, pool_budget
from jaxserve.loading.describe import DescribedModel
from jaxserve.planning.devices import Device
from jaxserve.planning.roofline import DecodeStep, decode_step, kv_bytes, prefill_rate
from jaxserve.planning.weights import (
    TokenWork,
    WeightKind,
    token_work,
    weight_kinds,
    widest_matrix,
)

CONTEXTS = (1024, 4096, 8192, 32_768)
BATCHES = (1, 8, 64)
_COUNT_BYTES = 5  # of the sampling state, a token of the vocabulary and slot: bool and int32


@dataclass(frozen=True)
class StepCost:
    """What XLA says of one step; see `StepPrograms`."""

    bucket: Bucket
    temporaries: int
    operations: int | None


Measure = Callable[[EngineShape], StepCost]  # the largest bucket's, compiled


@dataclass(frozen=True)
class Fit:
    """How many sequences of that context the pool holds at once, each in so many pages."""

    context: int
    pages: int
    batch: int


@dataclass(frozen=True)
class ServingPlan:
    """Sizes in bytes. num_pages: what the memory buys, page 0, which nobody gets, included;
    shape.num_pages: what the engine makes, which is fewer where all rows need no more.

    cost: the largest bucket's, compiled; None: memory.temporaries is an estimate, and no_cost says
    why. context: of the sequences in `decode`.
    """

    model: DescribedModel
    device: Device
    config: EngineConfig
    shape: EngineShape
    kv_spec: KVSpec
    layout: KVLayout
    weights: tuple[WeightKind, ...]
    work: TokenWork
    memory: MemoryPlan
    num_pages: int
    fits: tuple[Fit, ...]
    context: int
    decode: tuple[DecodeStep, ...]
    prefill: float | None
    cost: StepCost | None
    no_cost: str = ""

    @property
    def kv_itemsize(self) -> int:
        return int(self.shape.kv_dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes(self.shape.page_size, self.kv_itemsize)

    @property
    def matrix_rate(self) -> float | None:
        """Of the type that products are computed in."""
        return self.device.rates.get(self.shape.dtype.name)

    @property
    def largest(self) -> Bucket:
        return largest_bucket(self.shape.buckets)


def make_plan(
    model: DescribedModel,
    device: Device,
    config: EngineConfig,
    *,
    context: int = 1024,
    measure: Measure | None = None,
    no_measure: str = "",
) -> ServingPlan:
    """config.dtype is a type, not auto. context: of the sequences in the roofline.
    measure: compiles the largest step; None, for the reason no_measure: it is estimated.

    Raises InvalidRequestError where the model does not fit.
    """
    spec = model.model.kv_spec(model.config)
    layout = kv_layout(spec)
    estimate = estimated_temporaries(model, config)
    memory = _memory(model, device, config, estimate)
    shape = _shape(model, config, spec, memory.pool)
    cost = None if measure is None else measure(shape)
    if cost is not None:
        memory = _memory(model, device, config, cost.temporaries)
        shape = _shape(model, config, spec, memory.pool)
    page_bytes = layout.page_bytes(shape.page_size, shape.kv_dtype.itemsize)
    num_pages = memory.pool // page_bytes
    context = min(context, shape.max_model_len)
    fits = _fits(layout, shape, num_pages, context)
    work = token_work(model.model, model.config)
    rate = device.rates.get(shape.dtype.name)
    most = next(fit.batch for fit in fits if fit.context == context)
    decode = tuple(
        decode_step(
            batch,
            memory.weights,
            kv_bytes(spec, context, shape.kv_dtype.itemsize),
            device.bandwidth,
            operations_per_token=work.layers + work.unembed,
            matrix_rate=rate,
        )
        for batch in sorted({*BATCHES, most} - {0})
    )
    bucket = largest_bucket(shape.buckets)
    return ServingPlan(
        model=model,
        device=device,
        config=config,
        shape=shape,
        kv_spec=spec,
        layout=layout,
        weights=weight_kinds(model.params),
        work=work,
        memory=replace(memory, pool=shape.num_pages * page_bytes, bucket=bucket.name),
        num_pages=num_pages,
        fits=fits,
        context=context,
        decode=decode,
        prefill=prefill_rate(work.layers, rate),
        cost=cost,
        no_cost=no_measure,
    )


def estimated_temporaries(model: DescribedModel, config: EngineConfig) -> int:
    """Bytes of the largest step, by what XLA has needed for steps like it.

    Forward: the widest product and half as much again, and two hidden states, for every token.
    Sampling: six arrays of logits. Scratch of attention is small beside these.
    """
    rows = config.max_batch_rows + min(8, config.max_batch_rows)
    tokens = config.max_batch_rows + config.max_batch_tokens
    widest, inputs = widest_matrix(model.model, model.config)
    itemsize = jnp.dtype(config.dtype).itemsize
    forward = tokens * itemsize * (3 * widest // 2 + 2 * inputs)
    return max(forward, 6 * rows * 4 * model.vocab_size)


def _memory(
    model: DescribedModel, device: Device, config: EngineConfig, temporaries: int
) -> MemoryPlan:
    """The pool as large as it may be."""
    weights = tree_bytes(model.params)
    state = (config.max_batch_rows + 1) * model.vocab_size * _COUNT_BYTES
    usable = None
    pool = DEFAULT_KV_MEMORY
    if device.is_gpu:
        assert device.memory is not None
        usable = int(config.gpu_memory_utilization * device.memory)
        pool = pool_budget(usable, weights=weights, temporaries=temporaries, sampling_state=state)
    if config.kv_memory is not None:
        pool = config.kv_memory
    return MemoryPlan(
        weights=weights,
        pool=pool,
        temporaries=temporaries,
        sampling_state=state,
        host_tier=config.kv_host_memory,
        device=device.name,
        device_memory=device.memory,
        usable=usable,
    )


def _shape(model: DescribedModel, config: EngineConfig, spec: KVSpec, pool: int) -> EngineShape:
    return engine_shape(model, replace(config, kv_memory=pool), spec, None)


def _fits(layout: KVLayout, shape: EngineShape, num_pages: int, context: int) -> tuple[Fit, ...]:
    """For the usual contexts within the model's, its own, and the roofline's."""
    chunk = 1  # while they decode
    manager = KVManager(2, shape.page_size, layout.windows, max_chunk=chunk)
    longest = shape.max_model_len
    contexts = {length for length in CONTEXTS if length < longest} | {longest, context}
    fits = []
    for length in sorted(contexts):
        pages = manager.pages_needed(length)
        fits.append(Fit(length, pages, (num_pages - 1) // pages))
    return tuple(fits)
