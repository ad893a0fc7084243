"""Counter-based random numbers: the noise of a token is a function, not a stream.

A draw adds Gumbel noise to every token's logit and takes the largest. The noise of one token
depends on (seed, choice, position, token id) alone, so a seeded request gives the same tokens in
any row, batch, chunking or after a restart, and the noise of a few candidate tokens can be had
without that of the whole vocabulary. The generator is Threefry-2x32 with 20 rounds (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

import jax
import jax.numpy as jnp

# Purposes of noise: what is drawn for one of them tells nothing about another.
DRAW = 0  # chooses a token from the target's distribution
ACCEPT = 1  # judges a draft whose proposer drew it with noise of its own
RESIDUAL = 2  # chooses the token that replaces a rejected one of these
DRAFT = 3  # chooses a draft

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_GROUPS = 5  # of four rounds each, with a key injection after every group
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Encrypt two 32-bit counter words with two key words; uint32 arrays of any shapes that
    broadcast together."""
    words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    a = counter[0] + words[0]
    b = counter[1] + words[1]
    for group in range(_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            a = a + b
            b = (b << jnp.uint32(rotation)) | (b >> jnp.uint32(32 - rotation))
            b = a ^ b
        a = a + words[(group + 1) % 3]
        b = b + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def draw_keys(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
    """One key per sampled token: seed [S, 2] uint32, choice [S], position [S] -> [S, 2] uint32."""
    first, second = threefry2x32(
        (seed[:, 0], seed[:, 1]), (choice.astype(jnp.uint32), position.astype(jnp.uint32))
    )
    return jnp.stack([first, second], axis=1)


def gumbel(keys: jax.Array, token_ids: jax.Array, purpose: int | jax.Array) -> jax.Array:
    """Gumbel noise of tokens: keys [S, 2], token_ids [S or 1, N] int32 -> [S, N] float32.

    purpose: one for all, or [S, 1]. A uniform v near 0 makes a large value, and that is where
    float32 is finest, so the tail that decides draws is resolved to steps of 2^-32; values lie
    between -2.9 and 22.9.
    """
    return -jnp.log(-jnp.log1p(-_uniform(keys, token_ids, purpose)))


def uniform(keys: jax.Array, purpose: int) -> jax.Array:
    """One number per key [S, 2], evenly between 0 and 1, neither of them: [S] float32."""
    return _uniform(keys, jnp.zeros((1, 1), jnp.int32), purpose)[:, 0]


def _uniform(keys: jax.Array, token_ids: jax.Array, purpose: int | jax.Array) -> jax.Array:
    """[S, N] float32 from 2^-33 to 1 - 2^-24."""
    bits, _ = threefry2x32(
        (keys[:, :1], keys[:, 1:]), (token_ids.astype(jnp.uint32), jnp.uint32(purpose))
    )
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return jnp.minimum(uniform, jnp.float32(_LARGEST_BELOW_ONE))
