"""The bundle of backend functions a model is given: chosen once at start, pure, hashable."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.step_batch import StepBatch


class Attend(Protocol):
    """Write this step's keys and values, then attend causally over the row's pages.

    q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], or both None to read the KV that
    `layer` already holds (layers that share KV). Returns (out [T, num_heads, head_dim], kv_pool);
    rows of `out` that belong to padded tokens are zero. `window` counts the query itself.
    `sinks` [num_heads] are logits of a virtual key with no value; `softcap` c maps a score s to
    c * tanh(s / c); `tree_mask` [R, W, W] bool replaces causality among a verify row's own tokens.
    """

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv_pool: KVPool,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        tree_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPool]: ...


class Linear(Protocol):
    """See `Ops`."""

    def __call__(
        self,
        x: jax.Array,
        w: Any,
        bias: jax.Array | None = None,
        add_to: jax.Array | None = None,
    ) -> jax.Array: ...


class GatedLinear(Protocol):
    """See `Ops`."""

    def __call__(
        self, x: jax.Array, w: Any, activation: str, bias: jax.Array | None = None
    ) -> jax.Array: ...


@dataclass(frozen=True)
class Ops:
    """Backend functions. `linear(x [..., K], w [N, K], bias [N] | None, add_to [..., N] | None) ->
    [..., N]`, the last being what the result is added to: weights keep their output axis first,
    so both operands are contracted on their last axis; w is a plain array or a packed one
    (QuantizedArray, StackedRows).
    `embed(table [V, E], tokens [T]) -> [T, E]`: rows of a plain or packed table.
    `gated_linear(x [..., K], w [2F, K], activation, bias [2F] | None) -> activation(gate) * up
    [..., F]`, gate being the first half of what `linear` gives and up the other.
    `rotate(x [T, H, D], cos [T, D/2], sin [T, D/2])` turns the pairs (i, i + D/2) of every head.
    `row_sum(x [R, N]) -> [R]`, float32, is what the sampler normalises with.
    `rms_norm(x [..., E], weight [E], eps) -> [..., E]` computes in float32.
    """

    name: str
    attend: Attend
    linear: Linear
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array]
    embed: Callable[[Any, jax.Array], jax.Array]
    gated_linear: GatedLinear
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    row_sum: Callable[[jax.Array], jax.Array]
