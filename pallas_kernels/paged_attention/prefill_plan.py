"""The work of a prefill step: how query rows are packed into tiles, and the list of the tiles.

A tile is 128 query rows of one request and one group of query heads that share a KV head: so many
tokens times so many heads, head by head. All heads of the group read the same keys, so a tile of 8
heads reads them once for its 16 tokens, and needs no more than 16 tokens to be full.

The list is made by XLA from the lengths that the step brings, once for all layers: the grid of the
kernel is fixed, its tiles are looked up. The longest tiles come first, so that the short ones fill
the gaps at the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

QUERY_ROWS = 128
WARPGROUP_ROWS = 64
# Shared memory for wgmma has rows in eights; so has what TMA copies there.
TOKEN_BLOCK = 8


class Run(NamedTuple):
    """`tokens` rows of one warpgroup's half of a tile: one head's, from `first_token` on."""

    warpgroup: int
    row: int
    head: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class Packing:
    """`heads` query heads of a group in one tile, `tokens` tokens each."""

    heads: int
    tokens: int

    @property
    def runs(self) -> tuple[Run, ...]:
        """Which rows hold what; rows that no run names are padding."""
        runs = []
        for head in range(self.heads):
            token = 0
            while token < self.tokens:
                warpgroup, row = divmod(head * self.tokens + token, WARPGROUP_ROWS)
                tokens = min(self.tokens - token, WARPGROUP_ROWS - row)
                runs.append(Run(warpgroup, row, head, token, tokens))
                token += tokens
        return tuple(runs)

    def tokens_of(self, warpgroup: int) -> tuple[int, int]:
        """[first, last + 1) of the tokens of this warpgroup's rows."""
        runs = [run for run in self.runs if run.warpgroup == warpgroup]
        return (
            min((run.first_token for run in runs), default=0),
            max((run.first_token + run.tokens for run in runs), default=0),
        )


def packing(group: int, tokens: int) -> Packing:
    """How a group of `group` query heads is packed when the step has `tokens` tokens.

    Where heads fill a tile without rest, as many as can be, for then small chunks fill it too.
    Groups of 5 or 7 leave rows empty, which costs as much as it saves once a chunk fills a tile by
    itself: then only as many heads go together as fill it.
    """
    choices = [n for n in range(1, 17) if group % n == 0]
    packed = [Packing(n, QUERY_ROWS // n // TOKEN_BLOCK * TOKEN_BLOCK) for n in choices]
    if tokens >= 4 * QUERY_ROWS:
        return max(packed, key=lambda p: (p.heads * p.tokens, p.heads))
    return packed[-1]


class Work(NamedTuple):
    """Columns of the list, int32 [W, len(Work._fields)].

    The tile holds tokens [8 * block, 8 * block + tokens of the packing); of these [first, end)
    belong to `row`, and would stand at `position` + 0, 1, ...; first == end: there are none. No
    other tile writes [first, span): zeros go past `end`; span 0: the tile does not exist. It reads
    key tiles [first_tile, end_tile), of which keys outside [first_key, end_key) may be anybody's.
    """

    row: jax.Array
    block: jax.Array
    first: jax.Array
    end: jax.Array
    span: jax.Array
    position: jax.Array
    first_tile: jax.Array
    end_tile: jax.Array
    first_key: jax.Array
    end_key: jax.Array


def work_list(
    query_starts: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    num_tokens: int,
    tile_tokens: int,
    tile_keys: int,
    window: int | None,
) -> jax.Array:
    """The list of `Work` as one int32 array; starts, lens [R], rows in ascending order.

    TMA finds rows in eights: a row's first tile begins at the multiple of 8 before its first token.
    """
    starts, query_lens, kv_lens = (
        jnp.asarray(x, jnp.int32) for x in (query_starts, query_lens, kv_lens)
    )
    rows = starts.shape[0]
    # A row's share is its tokens and the padding behind it; share 0 is what lies before all rows.
    begins = jnp.where(query_lens > 0, starts, num_tokens)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jax.lax.cummin(begins, reverse=True)])
    ends = jnp.concatenate([begins[1:], jnp.full(1, num_tokens, jnp.int32)])
    bases = begins // TOKEN_BLOCK * TOKEN_BLOCK
    tiles_of = jnp.where(ends > begins, (ends - bases + tile_tokens - 1) // tile_tokens, 0)
    after = jnp.cumsum(tiles_of)
    at = jnp.arange(list_length(num_tokens, rows, tile_tokens), dtype=jnp.int32)
    share = jnp.minimum(jnp.searchsorted(after, at, side="right"), rows).astype(jnp.int32)
    base = bases[share] + (at - (after[share] - tiles_of[share])) * tile_tokens
    exists = at < after[-1]
    row = jnp.maximum(share - 1, 0)
    own = jnp.where(share > 0, query_lens[row], 0)
    first = jnp.maximum(begins[share] - base, 0)
    end = jnp.clip(begins[share] + own - base, first, tile_tokens)
    history = kv_lens[row] - query_lens[row]
    position = history + base - begins[share]
    reach = jnp.iinfo(jnp.int32).max if window is None else window
    used = exists & (end > first)
    first_tile = jnp.maximum(position + first - reach + 1, 0) // tile_keys
    end_tile = (position + end + tile_keys - 1) // tile_keys
    work = Work(
        row=row,
        block=base // TOKEN_BLOCK,
        first=first,
        end=jnp.where(used, end, first),
        span=jnp.where(exists, jnp.minimum(ends[share] - base, tile_tokens), 0),
        position=position,
        first_tile=jnp.where(used, first_tile, 0),
        end_tile=jnp.where(used, end_tile, 0),
        first_key=jnp.maximum(history - reach + 1, 0),
        end_key=kv_lens[row],
    )
    table = jnp.stack(work, axis=1).astype(jnp.int32)
    longest_first = jnp.argsort(jnp.where(exists, work.first_tile - work.end_tile, 1), stable=True)
    return table[longest_first]


def list_length(num_tokens: int, rows: int, tile_tokens: int) -> int:
    """Tiles that `rows` rows of `num_tokens` tokens in all can take, whatever their lengths."""
    shares = rows + 1
    return min(
        (num_tokens + shares * (tile_tokens + TOKEN_BLOCK - 2)) // tile_tokens, num_tokens + shares
    )
