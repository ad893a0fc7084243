"""Shared test settings: CPU, strict dtypes, no network, the downloaded models as fixtures."""

import os
import signal
from collections.abc import Callable
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
# Each parallel worker has a folder of its own: entries are not written atomically.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_CACHE = Path(__file__).resolve().parent.parent / ".test-cache" / f"xla-{_WORKER}"


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


def pytest_configure(config: pytest.Config) -> None:
    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.core.threads import use_threads

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs behind them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--interpreted"):
        use_threads(None, interpreting=True)
    use_compile_cache(_CACHE)
