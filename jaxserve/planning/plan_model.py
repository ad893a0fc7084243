"""From what a user names to a plan: reads headers, measures or compiles what can be."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core.backends import choose_backend, make_ops
from jaxserve.core.buckets import largest_bucket
from jaxserve.core.compile_cache import use_compile_cache
from jaxserve.core.machine_memory import machine_memory
from jaxserve.core.mesh import make_mesh
from jaxserve.core.program_loader import ProgramLoader, program_store
from jaxserve.engine.backend_settings import settle_backend
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.step_cost import StepPrograms
from jaxserve.loading.describe import DescribedModel, describe_model
from jaxserve.loading.model_cache import home
from jaxserve.loading.quantize_on_load import kept_layout
from jaxserve.planning import h200
from jaxserve.planning.cpu_speed import measured_cpu
from jaxserve.planning.devices import Device, find_gpu
from jaxserve.planning.serving_plan import ServingPlan, StepCost, make_plan

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Target:
    """A device, how an engine keeps weights there, and how to compile for it.

    mesh None: steps cannot be compiled, for the reason why_not.
    """

    device: Device
    backend: str
    layout: str | None
    mesh: Callable[[], Mesh] | None
    loader: ProgramLoader
    why_not: str = ""


def plan_model(
    model: str,
    device: str,
    config: EngineConfig,
    *,
    context: int,
    quantization: str | None = None,
    model_file: str | None = None,
    estimate: bool = False,
    say: Say,
) -> ServingPlan:
    """The plan of `model` on a device of the table, or on this machine ("cpu").

    config.dtype is a type, not auto. estimate: nothing is compiled or measured. say: hears what
    takes time. Raises PullError, ModelLoadError or InvalidRequestError.
    """
    target = _cpu(config, quantization, estimate) if device == "cpu" else _gpu(device, quantization)
    described = describe_model(
        model,
        dtype=config.dtype,
        weight_layout=target.layout,
        quantization=quantization,
        model_file=model_file,
    )
    spec = described.model.kv_spec(described.config)
    config = settle_backend(config, spec, jax.devices()[0], target.backend)
    why_not = "--estimate: no step was compiled" if estimate else target.why_not
    if target.mesh is None or estimate:
        return make_plan(described, target.device, config, context=context, no_measure=why_not)
    try:
        cost = _measure(described, target, config.attention_backend, say)
        return make_plan(described, target.device, config, context=context, measure=cost)
    except RuntimeError as error:  # whatever XLA raises
        log.warning("the largest step cannot be compiled: %s", error)
        why_not = f"the step cannot be compiled ({type(error).__name__}), so this is an estimate"
        return make_plan(described, target.device, config, context=context, no_measure=why_not)


def _measure(
    described: DescribedModel, target: _Target, backend: str, say: Say
) -> Callable[[EngineShape], StepCost]:
    def measure(shape: EngineShape) -> StepCost:
        bucket = largest_bucket(shape.buckets)
        say(f"compiling {bucket.name} for {target.device.title} ...")
        ops = make_ops(backend, described.model.kv_spec(described.config))
        assert target.mesh is not None
        steps = StepPrograms(described, shape, ops, target.mesh(), target.loader)
        return StepCost(bucket, steps.temporaries(bucket), steps.operations(bucket))

    return measure


def _cpu(config: EngineConfig, quantization: str | None, estimate: bool) -> _Target:
    """This machine, as the engine would run here."""
    use_compile_cache(home() / "compiled")
    unmeasured = Device("cpu", "this machine's CPU", "not measured", machine_memory())
    return _Target(
        device=unmeasured if estimate else measured_cpu(),
        backend=choose_backend(config.attention_backend),
        layout=kept_layout(config.attention_backend, quantization),
        mesh=make_mesh,
        loader=ProgramLoader(program_store()),
    )


def _gpu(name: str, quantization: str | None) -> _Target:
    """A GPU: Hopper has kernels of ours, which read packed weights too; on others attention is the
    reference and weights are plain unless they are asked to stay packed."""
    device = find_gpu(name)
    plain = None if quantization is None else "rows"
    why_not = f"steps can be compiled ahead for an h200 only; for {name} their size is an estimate"
    if name == "h200":
        problem = h200.why_not()
        why_not = f"the size of a step is an estimate: {problem}" if problem else ""
    return _Target(
        device=device,
        backend="mosaic_gpu" if device.is_hopper else "reference",
        layout="gpu" if device.is_hopper else plain,
        mesh=None if why_not else h200.h200_mesh,
        loader=ProgramLoader(),
        why_not=why_not,
    )
