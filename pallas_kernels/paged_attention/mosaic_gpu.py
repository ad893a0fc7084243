"""Paged attention of one step on a Hopper GPU: decode rows by one kernel, prefill rows by another.

Decode rows read far more than they compute, prefill rows the other way round, so the two have a
kernel each. Both read the stacked pool of the GPU: see `decode_attention` for its layout.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.decode_mosaic import decode_attention
from pallas_kernels.paged_attention.decode_tiles import DecodeTile
from pallas_kernels.paged_attention.prefill_mosaic import prefill_attention
from pallas_kernels.paged_attention.prefill_tiles import PrefillTile


def paged_attention_mosaic(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    decode_rows: int,
    width: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    splits: int | None = None,
    decode_tiles: DecodeTile | None = None,
    prefill_tiles: PrefillTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`paged_attention` over one layer of the GPU's pool.

    key_pages [A, N, K, page, D] and layer int32 [1], which picks of A; value_pages of the same
    shape, or [A, N, K, D, page] when 8-bit, with float32 scales [A, N, K, page]. Everything else is
    as in `paged_attention`. splits, decode_tiles, prefill_tiles: instead of what the tables choose.
    With `interpret` the kernels run on a CPU.

    Returns [T, H, D] in q's dtype, zero for padding. Raises ValueError for what no kernel takes.
    """
    split = decode_rows * width
    first, rest = slice(None, decode_rows), slice(decode_rows, None)
    parts = []
    if decode_rows:
        parts.append(
            decode_attention(
                q[:split], key_pages, value_pages, layer, page_table[first], query_lens[first],
                kv_lens[first], width=width, scale=scale, window=window, softcap=softcap,
                sinks=sinks, tree_mask=tree_mask, key_scales=key_scales,
                value_scales=value_scales, splits=splits, tiles=decode_tiles, interpret=interpret,
            )
        )  # fmt: skip
    if split < q.shape[0]:
        parts.append(
            prefill_attention(
                q[split:], key_pages, value_pages, layer, page_table[rest],
                query_starts[rest] - split, query_lens[rest], kv_lens[rest], scale=scale,
                window=window, softcap=softcap, sinks=sinks, key_scales=key_scales,
                value_scales=value_scales, tiles=prefill_tiles, interpret=interpret,
            )
        )  # fmt: skip
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
