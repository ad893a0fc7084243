"""Products of a mixture of experts: each row of activations with its own expert's matrix.

Rows are sorted by expert and every expert's rows begin a new tile, so that a tile of the kernel
has one matrix to read: the kernel of a single matrix, with a table of experts by tile. An expert
that no row asks for is not read.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.array import QuantizedArray
from pallas_kernels.quantized_matmul.gpu_layout import gpu_spec, padded_shape
from pallas_kernels.quantized_matmul.mosaic_gpu import checked_spec, make_plan, run_plan
from pallas_kernels.quantized_matmul.tiles import TABLE, Tiles, choose_tiles


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["source", "slot", "experts"],
    meta_fields=["tile"],
)
@dataclass(frozen=True)
class ExpertRows:
    """Rows of activations in the order of their experts.

    source [P] int32: the row at each place, -1 for filling. slot [T] int32: the place of each row.
    experts [P / tile] int32: of each tile of places, -1 for a tile of filling alone.
    """

    source: jax.Array
    slot: jax.Array
    experts: jax.Array
    tile: int


def group_by_expert(expert: jax.Array, num_experts: int) -> ExpertRows:
    """Places for rows [T] with these experts, int32 from 0 to num_experts - 1."""
    T = expert.shape[0]
    tile = _tile(T, num_experts)
    places = -(-(T + min(num_experts, T) * (tile - 1)) // tile) * tile
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1)
    tiles = -(-counts // tile)
    starts = (jnp.cumsum(tiles) - tiles) * tile
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sorted_expert = expert[order]
    before = jnp.cumsum(counts) - counts
    place = starts[sorted_expert] + jnp.arange(T, dtype=jnp.int32) - before[sorted_expert]
    source = jnp.full(places, -1, jnp.int32).at[place].set(order)
    slot = jnp.zeros(T, jnp.int32).at[order].set(place)
    ends = jnp.cumsum(tiles)
    number = jnp.arange(places // tile, dtype=jnp.int32)
    found = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    return ExpertRows(source, slot, jnp.where(found < num_experts, found, -1), tile)


def expert_matmul(
    x: jax.Array,
    w: QuantizedArray,
    rows: ExpertRows,
    *,
    out_dtype: Any = jnp.float32,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [P, K], in the order of `rows`, times each row's expert's matrix: [P, N] of out_dtype.

    w: layout "gpu" or "gpu_w8a8", every part with an axis of experts first, shape (N, K) that of
    one matrix; without a column order. Rows of filling hold anything on return.

    Raises ValueError for parts, rows or tiles that do not fit each other.
    """
    spec = gpu_spec(w)
    if not spec.group or "perm" in w.parts:
        raise ValueError(
            f"experts' matrices are packed and keep the order of their inputs; got "
            f"{w.format_name} with the parts {', '.join(sorted(w.parts))}"
        )
    checked_spec(w, (w.parts["codes"].shape[0],))
    P, (N, K) = x.shape[0], w.shape
    if x.shape != (rows.source.shape[0], K):
        raise ValueError(f"got rows {x.shape}, want {(rows.source.shape[0], K)}")
    padded_n, _ = padded_shape(w, spec)
    tiles = tiles or choose_tiles(rows.tile, padded_n, spec.high_bits)
    if tiles.block_m != rows.tile:
        raise ValueError(f"rows come in tiles of {rows.tile}, want {tiles.block_m}")
    plan = make_plan(w, P, out_dtype, tiles=tiles, grouped=True)
    return run_plan(plan, x, dict(w.parts), rows.experts, interpret=interpret)[:, :N].astype(
        out_dtype
    )


def _tile(rows: int, num_experts: int) -> int:
    """Rows to a tile: about as many as an expert has, so that few are filling."""
    share = -(-rows // num_experts)
    most = 64  # which every format has
    return next(
        row.tiles.block_m for row in TABLE if share <= row.max_rows or row.tiles.block_m == most
    )
