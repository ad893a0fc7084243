"""The load warpgroup of the prefill kernel: pages to tiles of 16-bit keys and values.

It walks the tile's part of the page table, one tile of keys after the other, and fills the ring
that the compute warpgroups empty. 16-bit pages go by TMA straight to the ring. 8-bit pages go by
TMA to a ring of their own, and from there, times their scales, to the 16-bit ring: once per tile,
for all 128 rows that read it.

Pages outside the row's keys are not read; what takes their place, and what the first and the last
page hold beyond them, may be anything, NaN too. For keys the mask of the scores is enough. Values
are made zeros, since 0 * NaN is not 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.paged_attention.prefill_plan import Work
from pallas_kernels.paged_attention.prefill_tiles import PrefillTile

_ROWS = 64
_SCALE_LANES = 32  # float32: TMA writes to multiples of 128 bytes


@dataclass(frozen=True)
class PageTiles:
    """How pages make up tiles of keys. `pieces` copies of `piece` keys make a tile."""

    tile: PrefillTile
    head_dim: int
    page_size: int
    dtype: Any  # of the ring
    page_dtype: Any

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.page_dtype).itemsize == 1

    @property
    def piece(self) -> int:
        return min(self.page_size, self.tile.keys)

    @property
    def pieces(self) -> int:
        return self.tile.keys // self.piece

    @property
    def value_rows(self) -> int:
        """Rows of a tile of transposed values: registers hold them in sixty-fours."""
        return -(-self.head_dim // _ROWS) * _ROWS

    @property
    def columns(self) -> int:
        """Columns of a tile that are taken to registers at a time."""
        return _ROWS if self.head_dim % _ROWS == 0 else self.head_dim

    def ring(self) -> dict[str, Any]:
        """Shared memory and barriers of this warpgroup's two ends."""
        tile, keys, D = self.tile, self.tile.keys, self.head_dim
        rows = mgpu.swizzle_transforms(D, self.dtype)
        arrivals = 1 if self.quantized else self.pieces
        full = mgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages)
        free = mgpu.Barrier(num_arrivals=2, num_barriers=tile.stages)
        scratch: dict[str, Any] = {
            "keys": mgpu.SMEM((tile.stages, keys, D), self.dtype, transforms=rows),
            "keys_full": full,
            "values_full": full,
            "keys_free": free,
            "values_free": free,
        }
        if not self.quantized:
            scratch["values"] = mgpu.SMEM((tile.stages, keys, D), self.dtype, transforms=rows)
            scratch["edge"] = mgpu.Barrier(num_arrivals=self.pieces)
            return scratch
        return scratch | self._quantized_ring()

    def _quantized_ring(self) -> dict[str, Any]:
        tile, keys, D = self.tile, self.tile.keys, self.head_dim
        columns = min(self.piece, _ROWS)
        scales = (
            mgpu.SMEM((tile.staged, keys), jnp.float32)
            if self.piece >= _SCALE_LANES
            else mgpu.SMEM((tile.staged, self.pieces, _SCALE_LANES), jnp.float32)
        )
        loaded = mgpu.Barrier(num_arrivals=2 * self.pieces, num_barriers=tile.staged)
        scratch = {
            "values": mgpu.SMEM(
                (tile.stages, self.value_rows, keys),
                self.dtype,
                transforms=mgpu.swizzle_transforms(columns, self.dtype),
            ),
            "key_codes": mgpu.SMEM(
                (tile.staged, keys, D),
                self.page_dtype,
                transforms=_code_transforms(self.columns, self.page_dtype),
            ),
            "value_codes": mgpu.SMEM(
                (tile.staged, self.pieces, self.value_rows, self.piece),
                self.page_dtype,
                transforms=_code_transforms(columns, self.page_dtype),
            ),
            "key_scales": scales,
            "value_scales": scales,
            "key_codes_full": loaded,
            "value_codes_full": loaded,
        }
        if self.piece < _SCALE_LANES:
            scratch["scale_row"] = mgpu.SMEM((keys,), jnp.float32)
        return scratch


def _code_transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    return mgpu.swizzle_transforms(columns, dtype) if columns % 32 == 0 else ()


@dataclass(frozen=True)
class Pool:
    """The pool's refs in device memory; scales None for 16-bit pages."""

    layer: Any
    page_table: Any
    key_pages: Any
    value_pages: Any
    key_scales: Any
    value_scales: Any


class Loader:
    """Fills the ring for one tile of queries."""

    def __init__(self, shape: PageTiles, pool: Pool, ring: dict[str, Any], work: Work, head: Any):
        self.shape, self.pool, self.ring, self.work = shape, pool, ring, work
        self.layer, self.head = pool.layer[0], head

    def run(self) -> None:
        if self.shape.quantized:
            self._run_quantized()
        else:
            self._run_plain()

    def _run_plain(self) -> None:
        ring, stages = self.ring, self.shape.tile.stages

        def step(i: jax.Array, _: None) -> None:
            n = i - self.work.first_tile
            slot = lax.rem(n, jnp.int32(stages))
            self._wait_free("keys_free", n, slot)
            self._fetch(i, "key_pages", ring["keys"].at[slot], ring["keys_full"].at[slot])
            self._wait_free("values_free", n, slot)
            values, full = ring["values"].at[slot], ring["values_full"].at[slot]
            strangers = self._has_strangers(i)

            @mgpu.when(jnp.logical_not(strangers))
            def whole() -> None:
                self._fetch(i, "value_pages", values, full)

            @mgpu.when(strangers)
            def cleared() -> None:
                self._fetch(i, "value_pages", values, ring["edge"])
                mgpu.barrier_wait(ring["edge"])
                self._clear_strangers(i, values)
                mgpu.commit_smem()
                for _ in range(self.shape.pieces):
                    mgpu.barrier_arrive(full)

        lax.fori_loop(self.work.first_tile, self.work.end_tile, step, None)

    def _run_quantized(self) -> None:
        tile, ring = self.shape.tile, self.ring
        first, end = self.work.first_tile, self.work.end_tile

        def fetch_keys(i: jax.Array, stage: jax.Array) -> None:
            full = ring["key_codes_full"].at[stage]
            self._fetch(i, "key_pages", ring["key_codes"].at[stage], full)
            self._fetch_scales(i, "key_scales", stage, full)

        def fetch_values(i: jax.Array, stage: jax.Array) -> None:
            full = ring["value_codes_full"].at[stage]
            self._fetch_codes(i, ring["value_codes"].at[stage], full)
            self._fetch_scales(i, "value_scales", stage, full)

        for n in range(tile.staged):

            @mgpu.when(first + n < end)
            def begin(n: int = n) -> None:
                fetch_keys(first + n, jnp.int32(n))
                fetch_values(first + n, jnp.int32(n))

        def step(i: jax.Array, _: None) -> None:
            n = i - first
            slot, stage = lax.rem(n, jnp.int32(tile.stages)), lax.rem(n, jnp.int32(tile.staged))
            ahead = i + tile.staged
            self._wait_free("keys_free", n, slot)
            mgpu.barrier_wait(ring["key_codes_full"].at[stage])
            self._dequantize_keys(stage, ring["keys"].at[slot])
            mgpu.commit_smem()
            mgpu.barrier_arrive(ring["keys_full"].at[slot])

            @mgpu.when(ahead < end)
            def next_keys() -> None:
                fetch_keys(ahead, stage)

            self._wait_free("values_free", n, slot)
            mgpu.barrier_wait(ring["value_codes_full"].at[stage])
            self._dequantize_values(i, stage, ring["values"].at[slot])
            mgpu.commit_smem()
            mgpu.barrier_arrive(ring["values_full"].at[slot])

            @mgpu.when(ahead < end)
            def next_values() -> None:
                fetch_values(ahead, stage)

        lax.fori_loop(first, end, step, None)

    def _wait_free(self, barrier: str, n: jax.Array, slot: jax.Array) -> None:
        @mgpu.when(n >= self.shape.tile.stages)
        def wait() -> None:
            mgpu.barrier_wait(self.ring[barrier].at[slot])

    def _pieces(
        self,
        i: jax.Array,
        barrier: Any,
        copy: Callable[[int, Any, Any], None],
    ) -> None:
        """copy(piece, page, keys of the page) of the pieces that hold keys of the row; one arrival
        at `barrier` for each, whether it does or not."""
        shape = self.shape
        for p in range(shape.pieces):
            key = i * shape.tile.keys + p * shape.piece
            holds = (key + shape.piece > self.work.first_key) & (key < self.work.end_key)

            @mgpu.when(holds)
            def read(p: int = p, key: jax.Array = key) -> None:
                page = self.pool.page_table[self.work.row, lax.div(key, jnp.int32(shape.page_size))]
                at: Any = slice(None)
                if shape.piece < shape.page_size:
                    at = mgpu.ds(lax.rem(key, jnp.int32(shape.page_size)), shape.piece)
                copy(p, page, at)

            @mgpu.when(jnp.logical_not(holds))
            def pass_over() -> None:
                mgpu.barrier_arrive(barrier)

    def _fetch(self, i: jax.Array, name: str, tile: Any, barrier: Any) -> None:
        """Pages [page, D] side by side as a tile [keys, D]."""
        pages, piece = getattr(self.pool, name), self.shape.piece

        def copy(p: int, page: Any, at: Any) -> None:
            source = pages.at[self.layer, page, self.head, at]
            target = tile.at[mgpu.ds(p * piece, piece)]
            mgpu.copy_gmem_to_smem(source, target, barrier, name=name)

        self._pieces(i, barrier, copy)

    def _fetch_codes(self, i: jax.Array, tile: Any, barrier: Any) -> None:
        """Transposed pages [D, page], one behind the other."""
        rows = mgpu.ds(0, self.shape.head_dim)

        def copy(p: int, page: Any, at: Any) -> None:
            source = self.pool.value_pages.at[self.layer, page, self.head, :, at]
            mgpu.copy_gmem_to_smem(source, tile.at[p, rows], barrier, name="value_pages")

        self._pieces(i, barrier, copy)

    def _fetch_scales(self, i: jax.Array, name: str, stage: jax.Array, barrier: Any) -> None:
        scales, piece = getattr(self.pool, name), self.shape.piece
        target = self.ring[name].at[stage]

        def copy(p: int, page: Any, at: Any) -> None:
            source = scales.at[self.layer, page, self.head, at]
            if piece < _SCALE_LANES:
                place = target.at[p, mgpu.ds(0, piece)]
            else:
                place = target.at[mgpu.ds(p * piece, piece)]
            mgpu.copy_gmem_to_smem(source, place, barrier, name=name)

        self._pieces(i, barrier, copy)

    def _has_strangers(self, i: jax.Array) -> jax.Array:
        """Whether tile i has slots of keys that are not the row's."""
        keys = self.shape.tile.keys
        return (i * keys < self.work.first_key) | ((i + 1) * keys > self.work.end_key)

    def _own(self, first: jax.Array, size: int, layout: Any) -> jax.Array:
        """Which of the keys [first, first + size) are the row's, bool [size]."""
        key = first + mgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
        return (key >= self.work.first_key) & (key < self.work.end_key)

    def _clear_strangers(self, i: jax.Array, values: Any) -> None:
        shape, wgmma = self.shape, mgpu.Layout.WGMMA
        for row in range(0, shape.tile.keys, _ROWS):
            own = self._own(i * shape.tile.keys + row, _ROWS, wgmma.reduce(1))
            for column in range(0, shape.head_dim, shape.columns):
                part = values.at[mgpu.ds(row, _ROWS), mgpu.ds(column, shape.columns)]
                x = mgpu.load(part, layout=wgmma)
                part[...] = jnp.where(lax.broadcast_in_dim(own, x.shape, [0]), x, jnp.zeros_like(x))

    def _dequantize_keys(self, stage: jax.Array, keys: Any) -> None:
        shape, wgmma = self.shape, mgpu.Layout.WGMMA
        scales = self.ring["key_scales"].at[stage]
        if shape.piece < _SCALE_LANES:
            scales = self._side_by_side(scales)
        for row in range(0, shape.tile.keys, _ROWS):
            rows = mgpu.ds(row, _ROWS)
            scale = mgpu.load(scales.at[rows], layout=wgmma.reduce(1))
            for column in range(0, shape.head_dim, shape.columns):
                part = (rows, mgpu.ds(column, shape.columns))
                x = self._codes(self.ring["key_codes"].at[stage].at[part])
                x = x * lax.broadcast_in_dim(scale, x.shape, [0])
                keys.at[part][...] = x.astype(shape.dtype)

    def _side_by_side(self, scales: Any) -> Any:
        """Scales of small pages, each at the start of a line of its own, one behind the other."""
        piece, row = self.shape.piece, self.ring["scale_row"]
        for p in range(self.shape.pieces):
            x = mgpu.load(scales.at[p, mgpu.ds(0, piece)], layout=mgpu.Layout.WGMMA.reduce(0))
            row.at[mgpu.ds(p * piece, piece)][...] = x
        return row

    def _dequantize_values(self, i: jax.Array, stage: jax.Array, values: Any) -> None:
        shape, wgmma = self.shape, mgpu.Layout.WGMMA
        size = min(shape.piece, _ROWS)
        for p in range(shape.pieces):
            for column in range(0, shape.piece, size):
                at = p * shape.piece + column
                own = self._own(i * shape.tile.keys + at, size, wgmma.reduce(0))
                scales = self.ring["value_scales"].at[stage]
                if shape.piece < _SCALE_LANES:
                    scales = scales.at[p, mgpu.ds(0, size)]
                else:
                    scales = scales.at[mgpu.ds(at, size)]
                scale = mgpu.load(scales, layout=wgmma.reduce(0))
                for row in range(0, shape.value_rows, _ROWS):
                    codes = self.ring["value_codes"].at[stage, p]
                    x = self._codes(codes.at[mgpu.ds(row, _ROWS), mgpu.ds(column, size)])
                    x = x * lax.broadcast_in_dim(scale, x.shape, [1])
                    x = jnp.where(lax.broadcast_in_dim(own, x.shape, [1]), x, jnp.zeros_like(x))
                    values.at[mgpu.ds(row, _ROWS), mgpu.ds(at, size)][...] = x.astype(shape.dtype)

    def _codes(self, ref: Any) -> jax.Array:
        """8-bit codes [64, n] as float32, by way of the 16-bit type that holds them exactly and
        that the GPU converts to quickly."""
        codes = mgpu.load(ref, layout=mgpu.Layout.WGMMA_UPCAST_2X)
        codes = mgpu.layout_cast(codes, mgpu.Layout.WGMMA)
        exact = jnp.bfloat16 if codes.dtype == jnp.int8 else jnp.float16
        return codes.astype(exact).astype(jnp.float32)
