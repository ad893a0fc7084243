"""The sum of an engine's memory, and the pool that fills a device."""

from dataclasses import replace

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.backends import make_ops
from jaxserve.core.buckets import largest_bucket
from jaxserve.core.gpu_memory import usable_memory
from jaxserve.core.machine_memory import machine_memory
from jaxserve.core.mesh import make_mesh
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.core.program_memory import ProgramMemory, step_temporaries, tree_bytes
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_shape import engine_shape
from jaxserve.engine.fit_memory import fill_memory, fit_to_device
from jaxserve.engine.memory_plan import MemoryPlan, pool_budget, size_text
from jaxserve.engine.step_cost import StepPrograms
from jaxserve.errors import InvalidRequestError
from tests.support.tiny_engine import SMALL, tiny_model

PLAN = MemoryPlan(
    weights=26_000_000_000,
    pool=40_000_000_000,
    temporaries=54_000_000,
    sampling_state=2_720_000,
    bucket="mixed16+512",
    device="h100",
    device_memory=80_000_000_000,
    usable=72_000_000_000,
)


def test_the_table_adds_up() -> None:
    assert PLAN.on_device == 66_056_720_000
    assert PLAN.lines() == [
        "  weights                         26.00 GB",
        "  KV pool                         40.00 GB",
        "  temporaries of mixed16+512      54.00 MB",
        "  sampling state                   2.72 MB",
        "  together, of 80.00 GB           66.06 GB",
    ]
    assert PLAN.warning is None


def test_host_memory_is_the_devices_on_a_cpu_only() -> None:
    tier = 10_000_000_000
    assert replace(PLAN, host_tier=tier).on_device == PLAN.on_device
    assert replace(PLAN, host_tier=tier, device="cpu").on_device == PLAN.on_device + tier
    assert replace(PLAN, host_tier=tier).rows[-1] == ("KV in host memory", tier)


def test_what_does_not_fit_is_warned_of() -> None:
    cpu = replace(PLAN, device="cpu", usable=None, device_memory=66_000_000_000)
    assert cpu.warning is not None
    assert cpu.warning.startswith("the plan takes 66.06 GB and this machine has 66.00 GB; lower")
    gpu = replace(PLAN, usable=60_000_000_000)
    assert gpu.warning is not None
    assert "h100 may use 60.00 GB" in gpu.warning
    assert replace(cpu, device_memory=None).warning is None


def test_the_pool_gets_what_is_left() -> None:
    assert pool_budget(100, weights=60, temporaries=10, sampling_state=5) == 25
    with pytest.raises(InvalidRequestError, match=r"weights take 95 bytes.*nothing is left"):
        pool_budget(100, weights=95, temporaries=3, sampling_state=2)


def test_steps_hold_the_larger_temporaries_and_all_results() -> None:
    programs = [ProgramMemory(100, 7), ProgramMemory(30, 2)]
    assert step_temporaries(programs) == 100 + 7 + 2


def test_machine_memory_is_that_of_the_container(tmp_path) -> None:
    installed = machine_memory(tmp_path / "none")
    assert installed
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert machine_memory(limit) == installed
    limit.write_text("1000000\n")
    assert machine_memory(limit) == 1_000_000


def test_sizes_are_powers_of_1000() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 10**9)] == [
        "0 bytes", "999 bytes", "1.00 kB", "1.00 GB",
    ]  # fmt: skip


def test_a_device_is_filled_to_the_last_page() -> None:
    """The pool that is found, and the largest step, fit; a page more would not."""
    model = tiny_model()
    config = EngineConfig(
        **{**SMALL, "max_batch_rows": 64}, dtype="float32", attention_backend="reference"
    )
    spec = model.model.kv_spec(model.config)
    ops, mesh, loader = make_ops("reference", spec), make_mesh(), ProgramLoader()
    usable = 3_000_000  # less than what all rows could use
    filled = fill_memory(model, config, spec, ops, mesh, loader, usable)
    assert filled.kv_memory is not None
    engine = Engine(model, filled)
    shape = engine_shape(model, filled, spec, None)
    bucket = largest_bucket(shape.buckets)
    steps = StepPrograms(model, shape, ops, mesh, loader)
    pool = tree_bytes(engine.runner.pool)
    page_bytes = pool // shape.num_pages
    state = 65 * model.vocab_size * 5
    taken = tree_bytes(model.params) + pool + steps.temporaries(bucket) + state
    assert usable - page_bytes < taken <= usable


def test_an_engine_tells_its_memory_when_it_is_ready(caplog, monkeypatch) -> None:
    heard: list[str] = []
    engine = Engine(tiny_model(), EngineConfig(**SMALL, attention_backend="reference"))
    monkeypatch.setattr("jaxserve.core.gpu_memory.machine_memory", lambda: 200_000)
    engine.warm_up(heard.append)
    plan = engine.runner.memory_plan(largest_bucket(engine.ready_buckets))
    told = [text for text in heard if text.startswith("memory:")]
    assert told == ["\n".join(["memory:", *plan.lines()])]
    assert "temporaries of mixed4+64" in told[0]
    assert "together, of 200.00 kB" in told[0]
    assert plan.pool == tree_bytes(engine.runner.pool)
    assert "this machine has 200.00 kB; lower --kv-memory" in caplog.text


def test_a_pool_whose_size_is_given_is_left_alone() -> None:
    model = tiny_model()
    spec = model.model.kv_spec(model.config)
    ops, mesh, loader = make_ops("reference", spec), make_mesh(), ProgramLoader()
    for config in (EngineConfig(), EngineConfig(kv_memory=1 << 20), EngineConfig(num_pages=9)):
        assert fit_to_device(model, config, spec, ops, mesh, loader) is config
    assert usable_memory(jax.devices()[0]) is None
