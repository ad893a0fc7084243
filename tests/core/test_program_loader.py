"""Programs take only the arrays they read, whether they were traced now or kept from before."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.program_loader import Leaves, Program, ProgramLoader
from jaxserve.core.program_store import ProgramStore

PARAMS = {"read": jnp.arange(4.0), "unread": jnp.ones(1000)}


def step(params: dict[str, jax.Array], x: jax.Array, state: jax.Array) -> tuple[Any, jax.Array]:
    """One parameter is read; the state is updated in place."""
    return {"y": x * params["read"]}, state + 1


def program() -> Program:
    args = (PARAMS, np.zeros(4, np.float32), jnp.zeros(3))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = ({"y": here}, here)
    return Program(
        "step",
        step,
        args,
        range(2, 3),
        result=({"y": 0}, 0),
        shardings=places,
        identity="test",
        keep=True,
    )


def check(loader: ProgramLoader) -> None:
    compiled = loader.compile(program())
    assert compiled.kept == (0, 2, 3)
    state = jnp.full(3, 5.0)
    outputs, new_state = compiled(Leaves(jax.tree.leaves(PARAMS)), np.full(4, 2, np.float32), state)
    np.testing.assert_array_equal(outputs["y"], [0, 2, 4, 6])
    np.testing.assert_array_equal(new_state, [6, 6, 6])
    assert state.is_deleted(), "the state was not donated"


def test_what_is_not_read_is_not_passed(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path / "traced")
    check(ProgramLoader(store))
    assert list((tmp_path / "traced").iterdir()), "the trace was not kept"
    check(ProgramLoader(store))


def test_without_a_store_everything_is_passed() -> None:
    compiled = ProgramLoader().compile(program())
    assert compiled.kept == (0, 1, 2, 3)
