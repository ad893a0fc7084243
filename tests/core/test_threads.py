"""The number of XLA's threads, which is fixed once a process: so each test takes a process."""

import os
import subprocess
import sys

import pytest

from jaxserve.core.threads import use_threads
from jaxserve.errors import InvalidRequestError

PRELUDE = """
import os
from jaxserve.core.threads import use_threads
from jaxserve.errors import InvalidRequestError

def pool():
    tasks = os.listdir("/proc/self/task")
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
    return sum(name.endswith("XLAEigen") for name in names)
"""


def run(program: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_xla_computes_on_as_many_threads_as_asked_for() -> None:
    asked = (os.cpu_count() or 1) + 3
    assert run(f"use_threads({asked})\nimport jax; jax.devices()\nprint(pool())") == str(asked)


def test_another_number_after_jax_has_started_is_refused() -> None:
    said = run(
        "use_threads(1)\nimport jax; jax.devices()\nuse_threads(1)\n"
        "try: use_threads(2)\nexcept InvalidRequestError as error: print(error.param, error)"
    )
    assert said.startswith("threads threads is 2, but JAX has started")


@pytest.mark.parametrize("count", [0, -1, 1025, True, 2.0])
def test_a_number_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequestError, match="whole number 1 to 1024"):
        use_threads(count)


def test_no_number_changes_nothing() -> None:
    before = dict(os.environ)
    use_threads(None)
    assert dict(os.environ) == before
