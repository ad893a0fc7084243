"""The largest entries of very wide rows, without sorting them.

XLA's own argmax over a vocabulary is slow on CPU (and very slow when fused with what makes the
values), and its top_k pays for every entry it scans. Both get cheaper by looking at the maxima of
small groups first: a plain max is one fast pass, and the k largest entries of a row lie in the k
groups with the largest maxima.
"""

import jax
import jax.numpy as jnp
from jax import lax

_ARGMAX_GROUP = 256
_SHORT = 1024  # entries of a row that take no time, so that less code does: it compiles sooner
_TOP_GROUP = 16  # one cache line of float32


def argmax(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest value and its lowest index per row: [S, N] -> ([S], [S] int32). Rows with a NaN give
    anything: XLA:CPU's maximum passes some of them by."""
    if values.shape[1] <= _SHORT:
        return jnp.max(values, axis=1), jnp.argmax(values, axis=1).astype(jnp.int32)
    groups = _grouped(values, _ARGMAX_GROUP)  # [S, G, group]
    maxima = jnp.max(groups, axis=2)
    group = jnp.argmax(maxima, axis=1)  # [S]
    members = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    index = group * groups.shape[2] + jnp.argmax(members, axis=1)
    # Not max(maxima): XLA would merge the two maxima into another pass over the whole row.
    return jnp.max(members, axis=1), index.astype(jnp.int32)


def top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row, largest first, and their indices: [S, N] -> [S, k] twice.

    k must not exceed N. Which of several equal values at the end are taken is not defined.
    """
    groups = _grouped(values, _TOP_GROUP)  # [S, G, group]
    if groups.shape[1] <= k:
        return _partial_sort(values, k)
    size = groups.shape[2]
    _, best = _partial_sort(jnp.max(groups, axis=2), k)  # [S, k] group numbers
    members = jnp.take_along_axis(groups, best[:, :, None], axis=1)
    top, place = _partial_sort(members.reshape(values.shape[0], k * size), k)
    group = jnp.take_along_axis(best, place // size, axis=1)
    return top, group * size + place % size


def kth_largest(values: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest value of each row, exactly: [S, N] float32, k [S] from 1 to N -> [S].

    Floats sort like integers once the sign is folded in, so the answer is built from its highest
    bit down, with one counting pass a bit: the largest t that at least k values reach.
    """

    k = k.astype(jnp.float32)

    def refine(step: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (jnp.uint32(0x80000000) >> step.astype(jnp.uint32))
        reached = values >= _float_of_rank(trial)[:, None]
        # Counted in float32, which XLA:CPU sums faster and which is exact up to 2^24.
        count = jnp.sum(jnp.where(reached, 1.0, 0.0), axis=1)
        return jnp.where(count >= k, trial, found)

    found = lax.fori_loop(0, 32, refine, jnp.zeros(k.shape, jnp.uint32))
    answer = _float_of_rank(found)
    # Images below that of -inf are NaN patterns, which no comparison reaches.
    return jnp.where(jnp.isnan(answer), -jnp.inf, answer)


def _partial_sort(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k, fenced off: XLA turns it into a sort of whole rows if it can see that the caller
    slices the result once more."""
    top, place = lax.optimization_barrier(tuple(lax.top_k(values, k)))
    return top, place


def _float_of_rank(rank: jax.Array) -> jax.Array:
    """The float32 whose place in the order of all floats is `rank` (uint32)."""
    sign = jnp.uint32(0x80000000)
    bits = jnp.where(rank >= sign, rank ^ sign, ~rank)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _grouped(values: jax.Array, size: int) -> jax.Array:
    """[S, N] -> [S, ceil(N / size), size], filled up with -inf."""
    rows, width = values.shape
    short = -width % size
    if short:
        values = jnp.pad(values, ((0, 0), (0, short)), constant_values=-jnp.inf)
    return values.reshape(rows, -1, size)
