"""Whole sequences through a model's own forward, with plain attention that has a gradient.

A ModelDef's forward and a draft's take flat tokens and an `attend`. Here the tokens are B windows
of L, each packed with one or more documents, and attention is a masked product: nothing
is paged, nothing is compiled for a backend, and everything can be differentiated.

Drafts are trained as they are used (EAGLE-3's training-time test): step j of a chain reads the
draft's own features of step j - 1. `ChainAttend` gives it the keys it would find in its cache then:
those of step 0 for what was known, and one of each later step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch

Steps = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values of each step of a chain
Seen = Mapping[int, Steps]  # of each layer; what stands in the place of a pool


@dataclass(frozen=True)
class ChainAttend:
    """`Ops.attend` over windows of `length` tokens. The "pool" is `Seen`, {} at the start of a
    chain; each further call for a layer is the chain's next step.
    """

    length: int

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv_pool: Any,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        tree_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `jaxserve.core.ops.Attend`."""
        if tree_mask is not None or sinks is not None:
            raise NotImplementedError("training attends without token trees and sinks")
        seen: Seen = kv_pool
        if k is not None and v is not None:
            steps = (*seen.get(layer, ()), (self._windows(k), self._windows(v)))
            seen = {**seen, layer: steps}
        out = self._attend(self._windows(q), seen[layer], batch, scale, window, softcap)
        return out.reshape(q.shape), seen

    def _windows(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.length, *x.shape[1:])  # [B, L, heads, D]

    def _attend(
        self,
        q: jax.Array,
        steps: Steps,
        batch: StepBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> jax.Array:
        B, L, H, D = q.shape
        K = steps[0][0].shape[2]
        ahead = len(steps) - 1  # tokens that this step's queries have drafted before them
        grouped = q.reshape(B, L, K, H // K, D) * scale
        scores = jnp.einsum("blkgd,bmkd->bkglm", grouped, steps[0][0])
        later = [
            (_shifted(keys, ahead - step), _shifted(values, ahead - step))
            for step, (keys, values) in enumerate(steps[1:], 1)
        ]
        own = [jnp.einsum("blkgd,blkd->bkgl", grouped, keys)[..., None] for keys, _ in later]
        scores = jnp.concatenate([scores, *own], axis=-1)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        row = jnp.asarray(batch.row_of_token).reshape(B, L)
        at = np.arange(L)
        back = at[:, None] - at[None, :]
        seen = (back >= ahead) & (back < (L if window is None else window))
        mask = seen[None] & (row[:, :, None] == row[:, None, :])
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, len(own))), constant_values=True)
        # A query sees itself at least (its own step's key is the last of them): no row is all -inf.
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bkglm,bmkd->blkgd", weights[..., :L], steps[0][1])
        for index, (_, values) in enumerate(later):
            out += jnp.einsum("bkgl,blkd->blkgd", weights[..., L + index], values)
        return out.reshape(B, L, H, D)


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """x [B, L, ...] moved to later positions, zeros in front."""
    return (
        x if by == 0 else jnp.pad(x, ((0, 0), (by, 0), *[(0, 0)] * (x.ndim - 2)))[:, : x.shape[1]]
    )


def sequence_ops(kv_spec: KVSpec, length: int) -> Ops:
    """Plain arithmetic with a gradient, for windows of `length` tokens."""
    return replace(make_ops("reference", kv_spec), attend=ChainAttend(length))


def sequence_batch(tokens: jax.Array, rows: jax.Array, positions: jax.Array) -> StepBatch:
    """Windows of tokens [B, L] as a step. rows, positions [B, L]: document and place in it."""
    flat = tokens.reshape(-1)
    none = np.zeros(1, np.int32)
    return StepBatch(
        tokens=flat,
        positions=positions.reshape(-1),
        row_of_token=rows.reshape(-1),
        prev_row=none,
        write_slot=none,
        query_starts=none,
        query_lens=none,
        kv_lens=none,
        page_table=none,
        adapter_slot=none,
        state_slot=none,
        sample_at=none,
        decode_rows=0,
        width=1,
    )


def no_keys() -> KVPool:
    """The pool at the start of a chain."""
    empty: Any = {}
    return empty
