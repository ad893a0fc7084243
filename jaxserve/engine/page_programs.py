"""Moving whole pages: within the pool, to the host and back, a fixed number in one call.

The number is fixed because each is a compiled program; what is left over is padded. On the device
these run in the order of their dispatch, between the steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.kv_pool import KVPool

# Pages a call moves. More would save calls (0.4 ms each where a pool has 60 arrays), but a single
# page copied on write costs as much as a full batch.
BATCH = 8

# Of n pages: [n, ...] for each array of the pool, in the order of `jax.tree.leaves`.
PageContents = tuple[np.ndarray, ...]


def copy_pages(pool: KVPool, sources: jax.Array, targets: jax.Array) -> KVPool:
    """Pages sources [n] of every array copied to targets [n]: all are read before any is written.

    A target past the end is dropped.
    """
    read, written = _at(pool, sources), _at(pool, targets)
    return jax.tree.map(lambda leaf: leaf.at[written].set(leaf[read], mode="drop"), pool)


def read_pages(pool: KVPool, pages: jax.Array) -> KVPool:
    """The given pages [n] of every array, [n, ...], in the form of a pool."""
    at, axis = _at(pool, pages), pool.page_axis
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf[at], axis, 0), pool)


def write_pages(pool: KVPool, pages: jax.Array, contents: KVPool) -> KVPool:
    """The pool with page pages[i] of every array replaced by contents[i]; a page past the end is
    dropped."""
    at, axis = _at(pool, pages), pool.page_axis

    def written(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[at].set(jnp.moveaxis(new, 0, axis), mode="drop")

    return jax.tree.map(written, pool, contents)


def scrub_pages(pool: KVPool, pages: jax.Array) -> KVPool:
    """Zero the given pages [n] in every layer: NaN must not outlive the row that made it."""
    at = _at(pool, pages)
    return jax.tree.map(lambda leaf: leaf.at[at].set(0), pool)


def _at(pool: KVPool, pages: jax.Array) -> tuple[slice | jax.Array, ...]:
    """The index of pages in every array of the pool."""
    return (*[slice(None)] * pool.page_axis, pages)


def batches(pages: Sequence[int], padding: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(first, number, ids [BATCH] int32 padded with `padding`) of each batch of `pages`."""
    for first in range(0, len(pages), BATCH):
        part = pages[first : first + BATCH]
        ids = np.full(BATCH, padding, np.int32)
        ids[: len(part)] = part
        yield first, len(part), ids


def padded(contents: PageContents, first: int, number: int) -> PageContents:
    """Pages [first, first + number) of `contents`, and as many more of anything as fill a batch."""
    if number == BATCH:
        return tuple(leaf[first : first + number] for leaf in contents)
    parts = []
    for leaf in contents:
        part = np.zeros((BATCH, *leaf.shape[1:]), leaf.dtype)
        part[:number] = leaf[first : first + number]
        parts.append(part)
    return tuple(parts)


@dataclass(frozen=True)
class PagesHandle:
    """Pages on their way to the host. parts: (pages that count, a batch of them)."""

    parts: tuple[tuple[int, KVPool], ...]

    @property
    def num_pages(self) -> int:
        return sum(number for number, _ in self.parts)

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        return all(leaf.is_ready() for _, pages in self.parts for leaf in jax.tree.leaves(pages))

    def result(self) -> PageContents:
        """Wait for the pages. The arrays are not to be written to."""
        fetched = [
            [leaf[:number] for leaf in jax.tree.leaves(jax.device_get(pages))]
            for number, pages in self.parts
        ]
        if len(fetched) == 1:
            return tuple(fetched[0])
        return tuple(np.concatenate(leaves) for leaves in zip(*fetched, strict=True))
