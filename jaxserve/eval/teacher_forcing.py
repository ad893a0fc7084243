"""Runs a given text through a model as the engine runs a prompt: chunks over a paged pool.

The batches come from the engine's own builder and the work is the model's forward with the
backend's ops, so what is measured is what is served: packed weights, the KV cache's type, the
attention backend. Only the last step differs: hidden states of every position are kept, where the
engine keeps those it samples from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core.backends import default_page_size, make_ops
from jaxserve.core.buckets import Bucket
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.engine.backend_settings import settle_backend
from jaxserve.engine.batch_builder import build_batch
from jaxserve.engine.engine_shape import resolve_dtype, resolve_kv_dtype
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request
from jaxserve.eval.position_scores import Head
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Config, ModelDef, Params
from jaxserve.models.contract import check_contract
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.quantized_matmul import QuantizedArray


@dataclass(frozen=True)
class Chunk:
    """Hidden states [T, E] of the tokens [start, start + length) of a window, then padding."""

    start: int
    length: int
    hidden: jax.Array


class TeacherForced:
    """A model and a pool that holds one window."""

    def __init__(self, model: LoadedModel, config: EngineConfig, context: int) -> None:
        """config: how it is served (backend, types, page size; max_batch_tokens is the longest
        chunk). context: tokens of the longest window. They fix every shape, so that texts of all
        lengths share compiled programs.

        Raises ModelLoadError if the model breaks its contract, InvalidRequestError for a backend
        that cannot run it.
        """
        kv_spec = model.model.kv_spec(model.config)
        dtype = resolve_dtype(config.dtype)
        config = settle_backend(config, kv_spec, jax.devices()[0])
        self._ops = make_ops(config.attention_backend, kv_spec)
        check_contract(model.model, model.config, self._ops, dtype.name)
        self._model = model
        layout = kv_layout(kv_spec)
        self._num_groups = layout.num_tables
        self._page_size = page_size = config.page_size or default_page_size(self._ops.name)
        self._pages = -(-context // page_size)
        self.chunk_tokens = min(config.max_batch_tokens, context)
        self._bucket = Bucket(
            decode_rows=0, width=1, prefill_rows=1, prefill_tokens=self.chunk_tokens
        )
        num_pages = self._num_groups * self._pages + 1  # with page 0
        self._pool = make_pool(
            layout, num_pages, page_size, resolve_kv_dtype(config), backend=self._ops.name
        )

    @property
    def params(self) -> Params:
        return self._model.params

    @property
    def head(self) -> Head:
        """What turns the hidden states of `run` into logits."""
        model = self._model
        return Head(model.model, model.config, self._ops, model.vocab_size)

    def describe(self) -> str:
        """How it is served: the formats of its matrices, the backend, the cache's type."""
        leaves = jax.tree.leaves(self.params, is_leaf=_is_packed)
        formats = {leaf.format_name if _is_packed(leaf) else leaf.dtype.name for leaf in leaves}
        cache = jax.tree.leaves(self._pool)[0].dtype.name
        return f"weights {', '.join(sorted(formats))}; backend {self._ops.name}; KV cache {cache}"

    def run(self, token_ids: Sequence[int]) -> Iterator[Chunk]:
        """The window's chunks in order; the pool is overwritten from its first page."""
        ids = np.arange(1, self._num_groups * self._pages + 1).reshape(self._num_groups, -1)
        request = Request(
            request_id="window",
            prompt_token_ids=tuple(token_ids),
            params=SamplingParams(),
            max_tokens=1,
            seed=0,
            pages=tuple(ids.tolist()),
        )
        for start in range(0, len(token_ids), self.chunk_tokens):
            length = min(self.chunk_tokens, len(token_ids) - start)
            plan = Plan(prefill=(Scheduled(request, start, length, samples=False),))
            batch = build_batch(
                plan,
                self._bucket,
                num_groups=self._num_groups,
                pages_per_row=self._pages,
                page_size=self._page_size,
            )
            hidden, self._pool = _forward(
                self._model.model, self._model.config, self._ops, self.params, self._pool, batch
            )
            yield Chunk(start, length, hidden)


def _is_packed(node: Any) -> bool:
    return isinstance(node, QuantizedArray)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _forward(
    model: ModelDef, config: Config, ops: Ops, params: Params, pool: KVPool, batch: StepBatch
) -> tuple[jax.Array, KVPool]:
    hidden, _taps, pool = model.forward(config, params, batch, pool, ops)
    return hidden, pool
