"""Shared test settings: CPU, strict dtypes, no network, the downloaded models as fixtures."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--interpreted",
        action="store_true",
        help="run the tests that interpret GPU kernels, and only those",
    )
    parser.addoption(
        "--model-file", action="append", default=[], help="also run the contract test on this file"
    )


# Engines of equal shape share their programs across tests and runs: most of a test's time is XLA's.
# Each worker has a folder of its own: JAX writes files that others might read half written, and to
# lock a shared folder it wants a bound on its size, for which it looks at all files to write one.
_CACHE = Path(__file__).resolve().parent.parent / ".test-cache" / "xla"
_AS_SERVED = ("acceptance", "pallas_kernels", "sampling")  # what XLA makes of it is the question


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that compile for a Hopper GPU run where its compilers are installed, or wherever
    REQUIRE_SM90A=1 says that they must be."""
    from jaxserve.planning.h200 import why_not

    wanted = config.getoption("--interpreted")
    _keep(
        config,
        items,
        lambda item: (
            item.get_closest_marker("sm90a") is not None
            or (item.get_closest_marker("interpreted") is not None) == wanted
        ),
    )
    if os.environ.get("REQUIRE_SM90A") == "1" or why_not() is None:
        return
    _keep(config, items, lambda item: not item.get_closest_marker("sm90a"))


def _keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]
) -> None:
    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """They are compiled in a hurry where a test is about what the host does, and go at the end.

    Half of all tests' time was XLA's; without its costlier passes it takes 40 % less. Compiled
    programs are mapped memory, of which a process may have so many pieces only (Linux: 65,530): a
    worker that kept all of them crashed in XLA after some thousand tests."""
    import jax

    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    as_served = folder in _AS_SERVED or request.node.get_closest_marker("as_served") is not None
    jax.config.update("jax_disable_most_optimizations", not as_served)
    yield
    for cached in [found for found in gc.get_objects() if type(found) is _lru_cache_wrapper]:
        if (cached.__module__ or "").startswith("tests."):  # engines, and programs they share
            cached.cache_clear()
    if (shared := sys.modules.get("tests.support.shared_programs")) is not None:
        shared.forget_programs()
    jax.clear_caches()
    gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    import jax

    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.core.threads import use_threads

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs behind them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--interpreted"):
        use_threads(None, interpreting=True)
    if (
        os.environ.get("REQUIRE_SM90A") == "1"
    ):  # what is compiled for an absent GPU is not read back
        jax.config.update("jax_enable_compilation_cache", False)
    use_compile_cache(_CACHE / os.environ.get("PYTEST_XDIST_WORKER", "alone"))
