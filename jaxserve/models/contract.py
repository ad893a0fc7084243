"""Checks a model against the contract at start, by shapes alone: no weights, no arithmetic.

A model file with a mistake should fail in a second with a sentence, not in the first request with
a trace through XLA. Every error says where, what was got and what was wanted.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import KVPool, pool_shapes
from jaxserve.core.kv_spec import KVSpec
from jaxserve.core.ops import Attend, Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import Config, ModelDef, ParamSpec, WeightNames

# One decode row, one prefill chunk and some padding: enough to tell T, R and S apart.
DECODE_ROWS, PREFILL_TOKENS, ROWS = 2, 5, 3
TOKENS = DECODE_ROWS + PREFILL_TOKENS
PAGES, PAGE_SIZE, PAGES_PER_ROW = 6, 16, 2  # a size that every backend takes
SAMPLED = 3


def check_contract(model: ModelDef, config: Config, ops: Ops, dtype: str = "float32") -> None:
    """Raise ModelLoadError unless `model` keeps what `models.base.ModelDef` promises.

    ops: the backend's, or any; its attend is traced, not run. dtype: of params and pool.
    """
    where = f"model {model.name!r}"
    _check_config(config, where)
    specs = model.param_specs(config)
    _check_params(specs, model.weight_names(config), where)
    spec = model.kv_spec(config)
    if not isinstance(spec, KVSpec):
        raise ModelLoadError(f"{where}: kv_spec: got {type(spec).__name__}, want KVSpec")
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype), specs, is_leaf=_is_spec
    )
    layout = kv_layout(spec)
    pool = pool_shapes(layout, PAGES, PAGE_SIZE, np.dtype(dtype), ops.name)
    attended: set[int] = set()
    watched = replace(ops, attend=_watch(ops.attend, spec, attended, f"{where}: forward"))
    result = _trace(
        f"{where}: forward",
        lambda params, batch, pool: model.forward(config, params, batch, pool, watched),
        params, batch_shapes(layout.num_tables), pool,
    )  # fmt: skip
    hidden = _check_forward(result, pool, f"{where}: forward")
    unread = sorted(set(range(spec.num_layers)) - attended)
    if unread:
        raise ModelLoadError(
            f"{where}: forward: kv_spec has {spec.num_layers} layers but ops.attend was never "
            f"called for {unread[:8]}"
        )
    sampled = jax.ShapeDtypeStruct((SAMPLED, hidden.shape[1]), hidden.dtype)
    logits = _trace(
        f"{where}: unembed",
        lambda params, hidden: model.unembed(config, params, hidden, ops),
        params, sampled,
    )  # fmt: skip
    want = jax.ShapeDtypeStruct((SAMPLED, config.vocab_size), "float32")
    _check_array(logits, want, f"{where}: unembed: logits [S, vocab_size]")


def _check_config(config: Config, where: str) -> None:
    try:
        hash(config)
    except TypeError as error:
        raise ModelLoadError(
            f"{where}: config: got {type(config).__name__}, which is not hashable ({error}); "
            "want a frozen dataclass of numbers, strings and tuples"
        ) from error
    for name in ("vocab_size", "max_position_embeddings"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{where}: config.{name}: got {value!r}, want an int above 0")


def _check_params(specs: Any, names: Any, where: str) -> None:
    """Both trees hold the right leaves and have the same structure; no tensor is used twice."""
    spec_paths = _leaves(specs, ParamSpec, f"{where}: param_specs")
    name_paths = _leaves(names, WeightNames, f"{where}: weight_names")
    for path in sorted(spec_paths.keys() ^ name_paths.keys()):
        has, lacks = "param_specs", "weight_names"
        if path in name_paths:
            has, lacks = lacks, has
        raise ModelLoadError(
            f"{where}: params{path} is in {has} but not in {lacks}; both must be the same tree"
        )
    users: dict[str, str] = {}
    for path, leaf in name_paths.items():
        if not leaf.names:
            raise ModelLoadError(f"{where}: weight_names{path}: got no tensor name, want some")
        for name in leaf.names:
            if name in users:
                raise ModelLoadError(
                    f"{where}: weight_names{path}: tensor {name!r} is already used by "
                    f"params{users[name]}"
                )
            users[name] = path


def _leaves(tree: Any, kind: type, where: str) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    if not found:
        raise ModelLoadError(f"{where}: got an empty tree, want {kind.__name__} leaves")
    for path, leaf in found:
        if not isinstance(leaf, kind):
            raise ModelLoadError(
                f"{where}{jax.tree_util.keystr(path)}: got {type(leaf).__name__}, "
                f"want {kind.__name__}"
            )
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _is_spec(node: Any) -> bool:
    return isinstance(node, ParamSpec)


def batch_shapes(num_tables: int) -> StepBatch:
    """A small step as ShapeDtypeStructs."""

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.int32)

    return StepBatch(
        tokens=ints(TOKENS),
        positions=ints(TOKENS),
        row_of_token=ints(TOKENS),
        prev_row=ints(TOKENS),
        write_slot=ints(num_tables, TOKENS),
        query_starts=ints(ROWS),
        query_lens=ints(ROWS),
        kv_lens=ints(ROWS),
        page_table=ints(num_tables, ROWS, PAGES_PER_ROW),
        adapter_slot=ints(ROWS),
        state_slot=ints(ROWS),
        sample_at=ints(ROWS, 1),
        decode_rows=DECODE_ROWS,
        width=1,
    )


def _watch(attend: Attend, spec: KVSpec, attended: set[int], where: str) -> Attend:
    """`attend`, with the shapes it is called with checked and the layers noted."""

    def watched(
        layer: int, q: jax.Array, k: Any, v: Any, kv_pool: KVPool, batch: StepBatch, **options: Any
    ) -> tuple[jax.Array, KVPool]:
        at = f"{where}: ops.attend(layer {layer})"
        if layer not in range(spec.num_layers):
            raise ModelLoadError(f"{at}: kv_spec has layers 0 to {spec.num_layers - 1}")
        group = spec.groups[spec.group_of_layer(layer)]
        if (k is None) != (v is None):
            raise ModelLoadError(f"{at}: got one of k and v, want both or neither")
        shape = (TOKENS, group.num_kv_heads, group.head_dim)
        for name, array in (("k", k), ("v", v)):
            if array is not None and array.shape != shape:
                raise ModelLoadError(f"{at}: {name}: got shape {array.shape}, want {shape}")
        if q.ndim != 3 or q.shape[::2] != shape[::2] or q.shape[1] % group.num_kv_heads:
            raise ModelLoadError(
                f"{at}: q: got shape {q.shape}, want ({TOKENS}, a multiple of "
                f"{group.num_kv_heads}, {group.head_dim})"
            )
        if group.window is not None and options.get("window") != group.window:
            raise ModelLoadError(
                f"{at}: window: got {options.get('window')}, want {group.window}: its KV group "
                f"{group.name!r} keeps no more than that"
            )
        attended.add(layer)
        return attend(layer, q, k, v, kv_pool, batch, **options)

    return watched


def _trace(where: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except ModelLoadError:
        raise
    except Exception as error:
        first_lines = "\n".join(str(error).splitlines()[:4])[:400]
        raise ModelLoadError(f"{where}: {type(error).__name__}: {first_lines}") from error


def _check_forward(result: Any, pool: KVPool, where: str) -> jax.ShapeDtypeStruct:
    """The three results of forward; returns hidden."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise ModelLoadError(
            f"{where}: got {type(result).__name__}, want a tuple (hidden, taps, kv_pool)"
        )
    hidden, taps, new_pool = result
    if not hasattr(hidden, "shape") or not hasattr(hidden, "dtype"):
        raise ModelLoadError(f"{where}: hidden: got {type(hidden).__name__}, want an array [T, E]")
    floating = jnp.issubdtype(hidden.dtype, jnp.floating)
    if hidden.ndim != 2 or hidden.shape[0] != TOKENS or not floating:
        raise ModelLoadError(
            f"{where}: hidden [T, E]: got shape {tuple(hidden.shape)} {hidden.dtype}, "
            f"want ({TOKENS}, E) of a float type"
        )
    if not isinstance(taps, Mapping):
        raise ModelLoadError(f"{where}: taps: got {type(taps).__name__}, want a dict; may be empty")
    got_leaves = jax.tree_util.tree_leaves_with_path(new_pool)
    if jax.tree.structure(new_pool) != jax.tree.structure(pool):
        raise ModelLoadError(
            f"{where}: kv_pool: got {type(new_pool).__name__} with {len(got_leaves)} arrays, want "
            "the pool as ops.attend returned it"
        )
    for (path, got), leaf in zip(got_leaves, jax.tree.leaves(pool), strict=True):
        _check_array(got, leaf, f"{where}: kv_pool{jax.tree_util.keystr(path)}")
    assert isinstance(hidden, jax.ShapeDtypeStruct)
    return hidden


def _check_array(got: Any, want: jax.ShapeDtypeStruct, where: str) -> None:
    if not hasattr(got, "shape") or not hasattr(got, "dtype"):
        raise ModelLoadError(f"{where}: got {type(got).__name__}, want an array")
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        raise ModelLoadError(
            f"{where}: got shape {tuple(got.shape)} {got.dtype}, "
            f"want {tuple(want.shape)} {want.dtype}"
        )
