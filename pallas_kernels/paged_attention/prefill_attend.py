"""A compute warpgroup of the prefill kernel: 64 query rows over the tile's keys.

Scores and weighted values by wgmma, softmax online in float32 and in powers of 2. The two
warpgroups take turns at the tensor cores: while one multiplies, the other exponentiates
(FlashAttention-3, Shah et al. 2024, arXiv:2407.08608).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.prefill_load import PageTiles
from pallas_kernels.paged_attention.prefill_plan import WARPGROUP_ROWS, Packing, Work
from pallas_kernels.paged_attention.prefill_tiles import PrefillTile

COMPUTE_WARPGROUPS = 2
_LOG2E = math.log2(math.e)
# Masked scores lie far below the first maximum: exp2(masked - maximum) is 0 in every tile.
_MASKED = -1e30
_FIRST_MAXIMUM = -1e29
_ROWS = mgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class PrefillKernel:
    """What is fixed when the kernel is compiled."""

    packing: Packing
    pages: PageTiles
    heads: int
    group: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool

    @property
    def tile(self) -> PrefillTile:
        return self.pages.tile

    @property
    def head_dim(self) -> int:
        return self.pages.head_dim


class Attend:
    """A compute warpgroup: 64 query rows over the tile's keys."""

    def __init__(
        self,
        kernel: PrefillKernel,
        ring: dict[str, Any],
        turn: Any,
        work: Work,
        warpgroup: jax.Array,
    ):
        self.kernel, self.ring, self.turn, self.work = kernel, ring, turn, work
        self.warpgroup = warpgroup
        row = warpgroup * WARPGROUP_ROWS + _iota(WARPGROUP_ROWS)
        tokens = jnp.int32(kernel.packing.tokens)
        self.head = lax.div(row, tokens)
        self.token = lax.rem(row, tokens)
        self.position = work.position + self.token
        ranges = [kernel.packing.tokens_of(w) for w in range(COMPUTE_WARPGROUPS)]
        first, end = (
            jnp.where(warpgroup == 0, jnp.int32(a), jnp.int32(b))
            for a, b in zip(*ranges, strict=True)
        )
        # Of the row's tokens, those of this warpgroup, and the tiles of keys that they see.
        first, end = jnp.maximum(first, work.first), jnp.minimum(end, work.end)
        keys = jnp.int32(kernel.tile.keys)
        self.first_query, self.last_query = work.position + first, work.position + end - 1
        self.first_tile, self.end_tile = work.first_tile, lax.div(self.last_query, keys) + 1
        if kernel.window is not None:
            lowest = jnp.maximum(self.first_query - (kernel.window - 1), 0)
            self.first_tile = lax.div(lowest, keys)
        self.first_tile = jnp.where(first < end, self.first_tile, work.first_tile)
        self.end_tile = jnp.where(first < end, self.end_tile, work.first_tile)

    def run(self, queries: Any, sinks: Any, first_head: jax.Array) -> jax.Array:
        """The weighted mean of the values, float32 [64, D]; zeros past the tile's tokens."""
        kernel = self.kernel
        shape = (WARPGROUP_ROWS, kernel.head_dim)
        maximum = mgpu.layout_cast(
            jnp.full(shape[:1], _FIRST_MAXIMUM * self._unit, jnp.float32), _ROWS
        )
        total = mgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), _ROWS)
        weighted = mgpu.layout_cast(jnp.zeros(shape, jnp.float32), mgpu.Layout.WGMMA)
        carry = (maximum, total, weighted)
        step = functools.partial(self._step, queries)
        mgpu.when(self.warpgroup == 1)(self._pass_turn)
        lax.fori_loop(self.work.first_tile, self.first_tile, self._skip, None)
        carry = lax.fori_loop(self.first_tile, self.end_tile, step, carry)
        lax.fori_loop(self.end_tile, self.work.end_tile, self._skip, None)
        mgpu.when(self.warpgroup == 0)(self._pass_turn)
        maximum, total, weighted = carry
        if kernel.sinks:
            sink = self._sinks(sinks, first_head)
            highest = jnp.maximum(maximum, sink)
            keep = jnp.exp2(maximum - highest)
            total = total * keep + jnp.exp2(sink - highest)
        else:
            keep = jnp.ones_like(total)
        share = keep / jnp.where(total == 0, jnp.ones_like(total), total)
        weighted = weighted * lax.broadcast_in_dim(share, shape, [0])
        own = lax.broadcast_in_dim(self.token < self.work.end, shape, [0])
        return jnp.where(own, weighted, jnp.zeros_like(weighted))

    @property
    def _unit(self) -> float:
        """Scores times this are exponents of 2; the soft cap has its own scale."""
        return _LOG2E * (self.kernel.scale if self.kernel.softcap is None else 1.0)

    def _pass_turn(self) -> None:
        """Meet the other warpgroup: one multiplies next, the other exponentiates."""
        mgpu.barrier_arrive(self.turn)
        mgpu.barrier_wait(self.turn)

    def _slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(i - self.work.first_tile, jnp.int32(self.kernel.tile.stages))

    def _skip(self, i: jax.Array, _: None) -> None:
        """A tile of keys that the other warpgroup needs and this one does not."""
        slot = self._slot(i)
        for name in ("keys", "values"):
            mgpu.barrier_wait(self.ring[f"{name}_full"].at[slot])
            mgpu.barrier_arrive(self.ring[f"{name}_free"].at[slot])
            self._pass_turn()

    def _step(
        self, queries: Any, i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One tile of keys: scores, softmax, weighted values."""
        maximum, total, weighted = carry
        ring, slot, keys = self.ring, self._slot(i), self.kernel.tile.keys
        mgpu.barrier_wait(ring["keys_full"].at[slot])

        def multiply(acc: Any) -> jax.Array:
            mgpu.wgmma(acc, queries, ring["keys"].at[slot].T)
            self._pass_turn()
            return acc[...]

        scores = mgpu.run_scoped(multiply, mgpu.ACC((WARPGROUP_ROWS, keys), jnp.float32))
        mgpu.barrier_arrive(ring["keys_free"].at[slot])
        scores = self._masked(i * keys, self._capped(scores))
        highest = jnp.maximum(maximum, scores.max(axis=1) * self._unit)
        keep = jnp.exp2(maximum - highest)
        p = jnp.exp2(scores * self._unit - lax.broadcast_in_dim(highest, scores.shape, [0]))
        total = total * keep + p.sum(axis=1)
        weighted = weighted * lax.broadcast_in_dim(keep, weighted.shape, [0])
        p = p.astype(self.kernel.pages.dtype)
        mgpu.barrier_arrive(self.turn)
        mgpu.barrier_wait(ring["values_full"].at[slot])
        mgpu.barrier_wait(self.turn)
        values = ring["values"].at[slot]
        if self.kernel.pages.quantized:
            values = values.at[mgpu.ds(0, self.kernel.head_dim)].T
        weighted = mgpu.accumulate(weighted, lambda acc: mgpu.wgmma(acc, p, values))
        mgpu.barrier_arrive(ring["values_free"].at[slot])
        return highest, total, weighted

    def _capped(self, scores: jax.Array) -> jax.Array:
        cap = self.kernel.softcap
        return scores if cap is None else cap * jnp.tanh(scores * (self.kernel.scale / cap))

    def _masked(self, first_key: jax.Array, scores: jax.Array) -> jax.Array:
        """Scores of what the queries do not see made _MASKED, in tiles at the edges of it."""
        window, size = self.kernel.window, scores.shape[1]
        edge = first_key + (size - 1) > self.first_query
        if window is not None:
            edge |= first_key <= self.last_query - window

        def mask(scores: jax.Array) -> jax.Array:
            column = mgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=mgpu.Layout.WGMMA)
            last = lax.broadcast_in_dim(self.position - first_key, scores.shape, [0])
            visible = column <= last
            if window is not None:
                visible &= column > last - window
            return jnp.where(visible, scores, jnp.full_like(scores, _MASKED))

        return lax.cond(edge, mask, lambda scores: scores, scores)

    def _sinks(self, sinks: Any, first_head: jax.Array) -> jax.Array:
        """Of each row, as an exponent of 2."""
        sink = jnp.zeros_like(self.position, jnp.float32)
        for head in range(self.kernel.packing.heads):
            of_head = sinks[first_head + head] * _LOG2E
            sink = jnp.where(self.head == head, jnp.full_like(sink, of_head), sink)
        return sink


def _iota(size: int) -> jax.Array:
    return mgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_ROWS)
