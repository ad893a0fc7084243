"""Which backend an engine runs on, and the settings that hang on it, said before anything is made.

What somebody asked for by name is refused where it cannot run, with what would; "auto" takes the
best that can, and says why where that is the reference.
"""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.core.backends import choose_backend, default_page_size, refusal, why_reference
from jaxserve.core.kv_pool import STACKED
from jaxserve.core.kv_spec import KVSpec
from jaxserve.engine.engine_shape import resolve_dtype, resolve_kv_dtype
from jaxserve.errors import InvalidRequestError

log = logging.getLogger(__name__)


def settle_backend(
    config: EngineConfig, kv_spec: KVSpec, device: jax.Device, chosen: str | None = None
) -> EngineConfig:
    """The settings with attention_backend and page_size named: what an engine on `device` runs.

    chosen: what "auto" stands for, where that is known without a device.
    Raises InvalidRequestError for a combination that no kernel takes.
    """
    try:
        name = chosen or choose_backend(config.attention_backend, device)
    except NotImplementedError as error:
        raise InvalidRequestError(str(error), "attention_backend") from None
    why = None if chosen else _told(config, device)
    problem = _problem(config, kv_spec, name)
    if problem is not None:
        if config.attention_backend != "auto":
            raise InvalidRequestError(problem, "attention_backend")
        name, why = "reference", problem
    if why is not None:
        log.warning("attention runs on the reference: %s", why)
    page_size = config.page_size or default_page_size(name)
    return replace(config, attention_backend=name, page_size=page_size)


def _told(config: EngineConfig, device: jax.Device) -> str | None:
    """Why a GPU gets the reference though nobody asked for it. (CPUs are told elsewhere.)"""
    is_gpu = config.attention_backend == "auto" and device.platform == "gpu"
    return why_reference(device) if is_gpu else None


def _problem(config: EngineConfig, kv_spec: KVSpec, name: str) -> str | None:
    kv_dtype = resolve_kv_dtype(config)
    if name == "cpu" and kv_dtype == jnp.float8_e4m3fn:
        return (
            "kv_cache_dtype is fp8, which the native CPU kernels do not read; choose int8, which "
            "takes as little memory, or --attention-backend reference"
        )
    if name in STACKED:
        page_size = config.page_size or default_page_size(name)
        return refusal(kv_spec, resolve_dtype(config.dtype), page_size, name)
    return None
