"""What a draft's heads read of the target at every token: kept in the pool, page by page.

A feature lies in the page of its token, so whatever happens to pages (sharing, copies, the host
tier, saved requests, cleaning) happens to features with no further word. A token's feature depends
on the tokens up to it and on nothing else, as its keys and values do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class FeatureForm:
    """size: numbers of a token, of type dtype. taps: the target's taps that they are, joined; none:
    its last hidden states. table: the table group, without a window, under whose pages they lie."""

    taps: tuple[str, ...]
    size: int
    dtype: str
    table: int

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page's features."""
        return page_size * self.size * jnp.dtype(self.dtype).itemsize


def captured(
    taps_wanted: tuple[str, ...], hidden: jax.Array, taps: Mapping[str, jax.Array]
) -> jax.Array:
    """The features [T, size] of a step, of what the target's forward returned."""
    if not taps_wanted:
        return hidden
    return jnp.concatenate([taps[name] for name in taps_wanted], axis=1)


def write_features(features: jax.Array, write_slot: jax.Array, values: jax.Array) -> jax.Array:
    """The pool's features [..., num_pages, page_size, size] with values [T, size] at the slots
    write_slot [T] (page * page_size + offset; -1: nothing is written)."""
    flat = features.reshape(-1, features.shape[-1])
    slot = jnp.where(write_slot < 0, flat.shape[0], write_slot)  # past the end, and so dropped
    return flat.at[slot].set(values.astype(flat.dtype), mode="drop").reshape(features.shape)


def read_features(features: jax.Array, slot: jax.Array) -> jax.Array:
    """[T, size] at slots [T]; where a slot is -1, anything."""
    return features.reshape(-1, features.shape[-1])[jnp.maximum(slot, 0)]
