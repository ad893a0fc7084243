"""Which query rows each thread block of latent attention takes.

Queries [T, H, C] are seen flat, as T * H rows of one token and head each. Every batch row's lie
together, so a block is up to 64 neighbouring rows of one batch row, whatever H is.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.latent_attention.tiles import ROWS

# Fields of a block in the plan.
FIRST, COUNT, TABLE_ROW, POSITION, END = range(5)
FIELDS = 5


def decode_blocks(width: int, heads: int) -> int:
    """Blocks that a decode row of `width` queries takes."""
    return -(-width * heads // ROWS)


def plan_decode(query_lens: jax.Array, kv_lens: jax.Array, *, width: int, heads: int) -> jax.Array:
    """Blocks [B * decode_blocks, FIELDS] of decode rows: row b's follow each other."""
    each = decode_blocks(width, heads)
    block = jnp.arange(query_lens.shape[0] * each)
    row = block // each
    return _fields(row, block % each, row * width, query_lens[row], kv_lens[row], heads)


def plan_prefill(
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    first_row: int,
    tokens: int,
    heads: int,
) -> jax.Array:
    """Blocks [n, FIELDS] of batch rows first_row and up, which own at most `tokens` queries."""
    lens = query_lens[first_row:]
    # A whole number of tokens in whole blocks wastes none; else each row may leave one unfilled.
    spare = 0 if heads % ROWS == 0 else lens.shape[0]
    block = jnp.arange(tokens * heads // ROWS + spare)
    blocks_of_row = (lens * heads + ROWS - 1) // ROWS
    ends = jnp.cumsum(blocks_of_row)
    row = jnp.minimum(jnp.searchsorted(ends, block, side="right"), lens.shape[0] - 1)
    index = block - (ends - blocks_of_row)[row]
    row = row + first_row
    return _fields(row, index, query_starts[row], query_lens[row], kv_lens[row], heads)


def _fields(
    row: jax.Array,
    index: jax.Array,
    start: jax.Array,
    query_len: jax.Array,
    kv_len: jax.Array,
    heads: int,
) -> jax.Array:
    """Block `index` of each batch row, whose queries begin at token `start`.

    FIRST: its first flat row; COUNT: how many are real (none: nothing to do); TABLE_ROW: of the
    page table; POSITION: what a query's token number lacks of its position; END: one past the last
    position that any of them sees.
    """
    first = start * heads + index * ROWS
    count = jnp.clip(query_len * heads - index * ROWS, 0, ROWS)
    position = kv_len - query_len - start
    end = jnp.where(count > 0, (first + count - 1) // heads + position + 1, 0)
    return jnp.stack([first, count, row, position, end], axis=1).astype(jnp.int32)
