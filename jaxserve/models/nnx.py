"""A ModelDef from a `flax.nnx` module: split once, merged inside the step.

The module stays what it was in training. Two things are asked of it: it is called with flat
tokens, their positions and an `attend` to use for attention, and it has a method `unembed`.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.core.kv_pool import KVPool
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import Config, ModelDef, Params, ParamSpec, Taps, WeightNames

Path = tuple[str | int, ...]  # of a parameter in the module: ("layers", 0, "qkv", "kernel")


class ModuleAttend(Protocol):
    """Causal attention over the request's paged KV; q, k and v as in `jaxserve.core.ops.Attend`.

    Returns [T, num_heads, head_dim]. The pool is threaded behind the scenes.
    """

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


class ServedModule(Protocol):
    """What from_nnx asks of an nnx.Module."""

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: ModuleAttend) -> jax.Array:
        """Hidden [T, E] of flat tokens [T], which belong to many requests."""
        ...

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [S, V] of hidden [S, E]."""
        ...


def dotted(path: Path) -> str:
    """The checkpoint tensor of a parameter, by default: "layers.0.qkv.kernel"."""
    return ".".join(str(part) for part in path)


def from_nnx(
    name: str,
    *,
    config_from_hf: Callable[[Mapping[str, Any]], Config],
    build: Callable[[Config, nnx.Rngs], Any],
    kv_spec: Callable[[Config], KVSpec],
    tensor_name: Callable[[Path], str] = dotted,
) -> ModelDef:
    """A ModelDef whose params are the module's nnx.Param, keyed by their dotted paths.

    config_from_hf: config.json to a hashable config (see ModelDef).
    build(config, rngs): makes the ServedModule; it is only traced, never allocated.
    kv_spec(config): the KV groups; `attend(layer, ...)` counts layers as they do.
    tensor_name(path): the checkpoint tensor of a parameter; it must have the parameter's own
    shape (an nnx.Linear keeps its kernel [in, out], most published checkpoints [out, in]).

    Raises ModelLoadError, when specs are first asked for, if the module holds state other than
    nnx.Param (batch statistics, dropout's random streams): a step must not change the model.
    """

    @lru_cache(maxsize=8)
    def split(config: Config) -> tuple[Any, dict[Path, nnx.Param]]:
        return _split(name, nnx.eval_shape(lambda: build(config, nnx.Rngs(0))))

    def param_specs(config: Config) -> dict[str, ParamSpec]:
        return {dotted(path): _spec(path, leaf) for path, leaf in split(config)[1].items()}

    def weight_names(config: Config) -> dict[str, WeightNames]:
        return {dotted(path): WeightNames((tensor_name(path),)) for path in split(config)[1]}

    def merge(config: Config, params: Params) -> ServedModule:
        graph, leaves = split(config)
        state = [(path, leaf.replace(params[dotted(path)])) for path, leaf in leaves.items()]
        return nnx.merge(graph, nnx.from_flat_state(state))

    def forward(
        config: Config, params: Params, batch: StepBatch, kv_pool: KVPool, ops: Ops
    ) -> tuple[jax.Array, Taps, KVPool]:
        pool = kv_pool

        def attend(
            layer: int, q: jax.Array, k: jax.Array | None, v: jax.Array | None, **options: Any
        ) -> jax.Array:
            nonlocal pool
            out, pool = ops.attend(layer, q, k, v, pool, batch, **options)
            return out

        hidden = merge(config, params)(
            jnp.asarray(batch.tokens), jnp.asarray(batch.positions), attend
        )
        return hidden, {}, pool

    def unembed(config: Config, params: Params, hidden: jax.Array, ops: Ops) -> jax.Array:  # noqa: ARG001
        return merge(config, params).unembed(hidden).astype(jnp.float32)

    return ModelDef(name, config_from_hf, param_specs, weight_names, kv_spec, forward, unembed)


def _split(name: str, abstract: Any) -> tuple[Any, dict[Path, nnx.Param]]:
    """The module's graph and its parameters by path; anything else it holds is an error."""
    graph, params, other = nnx.split(abstract, nnx.Param, ...)
    surplus = [dotted(path) for path, _ in nnx.to_flat_state(other)]
    if surplus:
        raise ModelLoadError(
            f"model {name!r}: got state that is not nnx.Param: {', '.join(surplus[:5])}; "
            "want parameters alone, so build it without dropout and running statistics"
        )
    return graph, dict(nnx.to_flat_state(params))


def _spec(path: Path, leaf: nnx.Param) -> ParamSpec:
    """nnx keeps no name of an initialiser, so it is read off flax's own parameter names."""
    init = {"scale": "ones", "bias": "zeros"}.get(str(path[-1]), "normal")
    return ParamSpec(tuple(leaf.shape), (None,) * len(leaf.shape), init)
