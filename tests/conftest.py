"""Shared test settings: CPU, strict dtypes, no network, the downloaded models as fixtures."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model-file", action="append", default=[], help="also run the contract test on this file"
    )


# Engines of equal shape share their programs across tests and runs: most of a test's time is XLA's.
# Each parallel worker has a folder of its own: entries are not written atomically.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_CACHE = Path(__file__).resolve().parent.parent / ".test-cache" / f"xla-{_WORKER}"


def pytest_configure() -> None:
    from jaxserve.core.compile_cache import use_compile_cache

    use_compile_cache(_CACHE)
