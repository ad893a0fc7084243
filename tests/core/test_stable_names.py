"""Names of values: equal values share one in every process, others never, some have none."""

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.core import stable_names
from jaxserve.core.backends import linear, make_ops
from jaxserve.core.stable_names import NoStableNameError, stable_name, surroundings
from jaxserve.models.llama import MODEL, attention_inputs
from jaxserve.models.registry import find_model
from tests.support.tiny_engine import tiny_config

pytestmark = pytest.mark.as_served  # as the process beside it
CONFIG = MODEL.config_from_hf(tiny_config())


def test_different_values_have_different_names() -> None:
    values = [
        None, True, 1, 1.0, 1.5, "1", b"1", (1,), [1], (), (1, 2), ((1,), 2), {"a": 1}, {"a": 2},
        np.dtype("float32"), np.dtype("int8"), linear, partial(linear, bias=None), partial(linear),
        CONFIG, replace(CONFIG, rms_norm_eps=1e-6), MODEL, find_model("Gemma3ForCausalLM"),
        attention_inputs, make_ops("reference", MODEL.kv_spec(CONFIG)),
    ]  # fmt: skip
    names = [stable_name(value) for value in values]
    assert len(set(names)) == len(values)
    assert not any(" at 0x" in name for name in names)


def test_equal_values_have_equal_names() -> None:
    again = MODEL.config_from_hf(tiny_config())
    assert stable_name((MODEL, again)) == stable_name((MODEL, CONFIG))


@dataclass(frozen=True)
class Own:
    value: int = 1


def own_function() -> None: ...


@pytest.mark.parametrize(
    "value",
    [lambda: 1, own_function, Own, Own(), partial(own_function), print, object(), {1, 2},
     np.ones(2), replace(MODEL, forward=own_function), jax.jit(own_function), (1, [own_function])],
)  # fmt: skip
def test_what_is_not_ours_or_not_at_the_top_has_no_name(value: object) -> None:
    with pytest.raises(NoStableNameError):
        stable_name(value)


def test_another_process_agrees() -> None:
    program = (
        "from tests.core.test_stable_names import CONFIG, MODEL\n"
        "from jaxserve.core.stable_names import stable_name, surroundings\n"
        "import os; os.environ['JAX_COMPILATION_CACHE_DIR'] = '/nowhere'\n"
        "print(stable_name((MODEL, CONFIG)), surroundings())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [*stable_name((MODEL, CONFIG)).split(), surroundings()]


def test_surroundings_change_with_settings_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert surroundings() != before
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        assert surroundings() != before
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert surroundings() != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    monkeypatch.setattr(stable_names, "_source_hash", lambda: "other source")
    assert surroundings() != before
    monkeypatch.undo()
    assert surroundings() == before


def test_source_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    hash_of = stable_names._source_hash.__wrapped__
    before = hash_of()
    monkeypatch.setattr(stable_names, "_TRACED_SOURCE", ("core/*.py",))
    assert hash_of() != before
