"""Token counts per request slot: what penalties are computed from. It lives on the device."""

import jax
import jax.numpy as jnp

from jaxserve.core.step_batch import Array, SamplingState


def make_state(slots: int, vocab: int) -> SamplingState:
    """Empty counts for `slots` slots; slot 0 is the dummy of rows that use none."""
    return SamplingState(
        in_prompt=jnp.zeros((slots, vocab), bool),
        output_counts=jnp.zeros((slots, vocab), jnp.int32),
    )


def set_slot(
    state: SamplingState, slot: Array, in_prompt: Array, output_counts: Array
) -> SamplingState:
    """Put a request into a slot: in_prompt [V] bool, output_counts [V] int32."""
    return SamplingState(
        in_prompt=jnp.asarray(state.in_prompt).at[slot].set(in_prompt),
        output_counts=jnp.asarray(state.output_counts).at[slot].set(output_counts),
    )


def count_tokens(
    state: SamplingState, slot: jax.Array, tokens: jax.Array, counted: jax.Array
) -> SamplingState:
    """Add one to (slot, token) for each token [N] where `counted` and slot > 0.

    Not under a cond: adding nothing to the dummy slot is cheaper than what XLA does to keep a
    donated array in place across branches.
    """
    add = (counted & (slot > 0)).astype(jnp.int32)
    counts = jnp.asarray(state.output_counts).at[slot, tokens].add(add)
    return SamplingState(in_prompt=state.in_prompt, output_counts=counts)


def check_state(state: SamplingState, vocab_size: int) -> None:
    """Raises ValueError when the state is narrower than the vocabulary."""
    if state.output_counts.shape[1] < vocab_size:
        raise ValueError(
            f"the sampling state counts {state.output_counts.shape[1]} tokens, the vocabulary has "
            f"{vocab_size}; make the state with the model's vocabulary size"
        )


def token_counts(state: SamplingState, slot: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """in_prompt [S, vocab] bool and output_counts [S, vocab] int32 of slots [S]."""
    return (
        jnp.asarray(state.in_prompt)[slot, :vocab],
        jnp.asarray(state.output_counts)[slot, :vocab],
    )
