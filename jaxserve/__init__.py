"""jaxserve: a functional LLM inference engine in JAX.

The names below are loaded when they are first used, so that `import jaxserve` and the command
line's help do not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.beam_search import BeamSearchParams
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "EngineConfig", "SamplingParams"]

_HOMES = {
    "BeamSearchParams": "jaxserve.engine.beam_search",
    "EngineConfig": "jaxserve.config",
    "LLM": "jaxserve.llm",
    "SamplingParams": "jaxserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
