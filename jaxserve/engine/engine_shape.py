"""The sizes of an engine, worked out from the model and the settings before anything is made."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import DEFAULT_KV_MEMORY, EngineConfig
from jaxserve.core.backends import default_page_size
from jaxserve.core.buckets import Bucket, bucket_table, prefill_sizes
from jaxserve.core.features import FeatureForm
from jaxserve.core.kv_layout import KVLayout, kv_layout
from jaxserve.core.kv_spec import KVSpec
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.plan import Limits
from jaxserve.errors import InvalidRequestError


class WithContext(Protocol):
    """A model, loaded or only described."""

    @property
    def max_model_len(self) -> int: ...


# With the prefix cache, the most requests of full length that have ended whose KV is kept for each
# that may run. More would cost memory that serves nobody for long.
_ENDED_PER_ROW = 3
_KV_DTYPES = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class EngineShape:
    """kv_dtype: of the pool. num_pages counts page 0, which is never handed out; num_groups are
    table groups (kv_layout.py); pages_per_row is a row's longest. audit_pages: more pages of the
    pool, behind the others, that only an audit of speculation writes (draft_audit.py). features:
    what the pool keeps beside keys and values."""

    dtype: np.dtype
    kv_dtype: np.dtype
    page_size: int
    num_pages: int
    num_groups: int
    pages_per_row: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    limits: Limits
    audit_pages: int = 0
    features: FeatureForm | None = None

    def page_bytes(self, layout: KVLayout) -> int:
        """Bytes of a page in all arrays of the model's pool."""
        return _pool_page_bytes(layout, self.page_size, self.kv_dtype, self.features)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, those that are never handed out among them."""
        return self.num_pages + self.audit_pages

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return max(bucket.num_rows for bucket in self.buckets)

    @property
    def max_draws(self) -> int:
        """The most tokens a row may draw in a step."""
        return max(MAX_BURST, *(bucket.width for bucket in self.buckets))


def engine_shape(
    model: WithContext,
    config: EngineConfig,
    kv_spec: KVSpec,
    max_chunk: int | None,
    draft_spec: KVSpec | None = None,
    features: FeatureForm | None = None,
) -> EngineShape:
    """draft_spec: of a draft whose pages lie beside the model's. features: what the model's steps
    keep for a draft.

    Raises InvalidRequestError if kv_memory does not buy a single usable page.
    """
    dtype = resolve_dtype(config.dtype)
    kv_dtype = resolve_kv_dtype(config)
    max_model_len = min(model.max_model_len, config.max_model_len or model.max_model_len)
    layout = kv_layout(kv_spec)
    page_size = config.page_size or default_page_size(config.attention_backend)
    longest_chunk = min(max_chunk or config.max_batch_tokens, config.max_batch_tokens)
    page_bytes = _pool_page_bytes(layout, page_size, kv_dtype, features)
    if draft_spec is not None:
        page_bytes += kv_layout(draft_spec).page_bytes(page_size, kv_dtype.itemsize)
    audit_pages = _audit_pages(layout, page_size) if config.speculative_audit else 0
    num_pages = config.num_pages or _affordable_pages(
        config,
        page_bytes,
        audit_pages,
        KVManager(2, page_size, layout.windows, max_chunk=longest_chunk),
        max_model_len,
    )
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    buckets = bucket_table(config.max_batch_rows, config.max_batch_tokens, drafts)
    limits = Limits(
        max_batch_rows=config.max_batch_rows,
        max_batch_tokens=config.max_batch_tokens,
        max_prefill_rows=max(bucket.prefill_rows for bucket in buckets),
        max_model_len=max_model_len,
        max_queue=config.max_queue,
        prefill_sizes=prefill_sizes(buckets),
        max_chunk=max_chunk,
        policy=config.scheduling,
        batching=config.batching,
        max_burst=min(MAX_BURST, longest_chunk),
    )
    return EngineShape(
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        num_pages=num_pages,
        num_groups=layout.num_tables,
        pages_per_row=_pages_per_row(layout, num_pages, page_size, max_model_len),
        max_model_len=max_model_len,
        buckets=buckets,
        limits=limits,
        audit_pages=audit_pages,
        features=features,
    )


def _pool_page_bytes(
    layout: KVLayout, page_size: int, kv_dtype: np.dtype, features: FeatureForm | None
) -> int:
    kept = 0 if features is None else features.page_bytes(page_size)
    return layout.page_bytes(page_size, kv_dtype.itemsize) + kept


def resolve_dtype(dtype: str) -> np.dtype:
    """The type of "float32", "bfloat16" or "auto" (bfloat16 on a GPU, float32 on a CPU)."""
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return jnp.dtype(dtype)


def resolve_kv_dtype(config: EngineConfig) -> np.dtype:
    """The type keys and values are kept in: 8 bits (with scales), or that of the model."""
    if config.kv_cache_dtype == "auto":
        return resolve_dtype(config.dtype)
    return np.dtype(_KV_DTYPES[config.kv_cache_dtype])


def _pages_per_row(layout: KVLayout, num_pages: int, page_size: int, max_model_len: int) -> int:
    """Pages of the longest row, in one table: groups without a window hold all of them."""
    longest, whole = max_model_len, layout.windows.count(None)
    if whole:
        # The last token of a request needs no KV, so a full pool can still draw one.
        longest = min(longest, (num_pages - 1) // whole * page_size + 1)
    return -(-longest // page_size)


def _audit_pages(layout: KVLayout, page_size: int) -> int:
    """In each table group those that a burst writes which begins anywhere in a page."""
    return layout.num_tables * ((page_size + MAX_BURST - 2) // page_size + 1)


def _affordable_pages(
    config: EngineConfig,
    page_bytes: int,
    audit_pages: int,
    manager: KVManager,
    max_model_len: int,
) -> int:
    """What kv_memory buys beside audit_pages, page 0 included, or fewer if fewer serve as well:
    enough for all rows to be full, and with the prefix cache for the KV of some more requests that
    have ended."""
    kv_memory = DEFAULT_KV_MEMORY if config.kv_memory is None else config.kv_memory
    affordable = kv_memory // page_bytes
    fewest = manager.pages_needed(1) + 1 + audit_pages
    if affordable < fewest:
        raise InvalidRequestError(
            f"kv_memory is {kv_memory} bytes and a page of {manager.page_size} tokens takes "
            f"{page_bytes}; give at least {fewest * page_bytes} bytes",
            "kv_memory",
        )
    requests = config.max_batch_rows * (1 + _ENDED_PER_ROW * config.prefix_cache)
    return min(affordable - audit_pages, requests * manager.pages_needed(max_model_len) + 1)
