"""From named tensors, or a seed, to a model's parameters on the device.

Every tensor of a checkpoint is accounted for: what a model wants and the file lacks, has in
another shape, or holds beyond it, is one error that lists all of it. Silently dropped or unset
weights give fluent nonsense that no later test catches.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_copy, aligned_empty
from jaxserve.loading.hf_quantization import may_be_left_over
from jaxserve.loading.packed_params import load_packed_param, packed_param_shape, stays_packed
from jaxserve.loading.quantize_on_load import QuantizingSource
from jaxserve.loading.random_init import standard_noise
from jaxserve.loading.tensor_source import ArraySource, TensorSource
from jaxserve.models.base import Config, ParameterTree, Params, ParamSpec, WeightNames
from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows

Progress = Callable[[str], None]
Leaf = np.ndarray | QuantizedArray | StackedRows  # of a parameter tree, on the host

MAX_LISTED = 12  # tensors an error names; it counts the rest
NORMAL_STD = 0.02  # of ParamSpec's init "normal"
_WORKERS = 2  # dequantising is numpy, which lets go of the GIL
_PROGRESS_SECONDS = 1.0

# Tables that some checkpoints store although programs compute them.
_NOT_WEIGHTS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_EMBEDDING, _UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
_MTP_JOIN = "eh_proj.weight"  # the tensor that every MTP module has


@dataclass(frozen=True)
class _Param:
    """A leaf of the parameter tree: where it sits, what it is, what it is joined from."""

    path: str
    spec: ParamSpec
    names: tuple[str, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Numbers it stands for."""
        return math.prod(self.spec.shape)


def assemble(
    model: ParameterTree,
    config: Config,
    source: TensorSource,
    dtype: str,
    progress: Progress | None = None,
    layout: str | None = None,
) -> Params:
    """The tree of model.param_specs(config), filled from `source`, on the default device.

    dtype: numpy name of the parameters' type where a spec does not pin one. layout: None for plain
    arrays only; "rows", "panels" or "gpu" to keep every packable parameter as the file packs it, in
    that layout (a QuantizedArray, or StackedRows of several). Host memory holds two parameters
    beside the result at most. Raises ModelLoadError listing every tensor that is missing, left
    over or misshaped.
    """
    params, treedef = _params(model, config, dtype)
    _check_tensors(params, source)

    def load(param: _Param) -> Leaf:
        kept = _layout(param, source, param.names, layout)
        if kept is not None:
            return load_packed_param(source, param.names, param.dtype, kept)
        return _load_joined(source, param)

    return jax.tree.unflatten(treedef, _on_device(load, params, progress))


def param_shapes(
    model: ParameterTree,
    config: Config,
    source: TensorSource | None,
    dtype: str,
    layout: str | None,
    quantization: str | None = None,
) -> Params:
    """The tree that assemble gives, with a jax ShapeDtypeStruct for every array: headers are read.

    source None: the tree that random_params gives. quantization: packs plain matrices, as
    QuantizingSource does. Raises as assemble does.
    """
    params, treedef = _params(model, config, dtype)
    if source is not None:
        _check_tensors(params, source)

    def shape(param: _Param) -> Any:
        names, of = (param.names, source) if source is not None else _drawn(param)
        if quantization is not None:
            of = QuantizingSource(of, quantization)
        kept = _layout(param, of, names, layout)
        if kept is None:
            return jax.ShapeDtypeStruct(param.spec.shape, param.dtype)
        packed = packed_param_shape(of, names, param.dtype, kept)
        return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), packed)

    return jax.tree.unflatten(treedef, [shape(param) for param in params])


def _layout(
    param: _Param, source: TensorSource, names: Sequence[str], layout: str | None
) -> str | None:
    """The layout the parameter of these tensors is kept in; None: it is a plain array."""
    if layout is None or not param.spec.packable or not stays_packed(source, names, layout):
        return None
    return layout


def _drawn(param: _Param) -> tuple[tuple[str, ...], TensorSource]:
    """What random_params packs: one matrix, under its first name. No memory is behind it."""
    nothing = np.broadcast_to(np.float32(0), param.spec.shape)
    return param.names[:1], ArraySource({param.names[0]: nothing}, param.path)


def random_params(
    model: ParameterTree,
    config: Config,
    seed: int,
    dtype: str,
    layout: str | None = None,
    quantization: str | None = None,
) -> Params:
    """The same tree, drawn: each parameter from the seed and its own path, by its spec's init.

    Equal on every machine (see random_init), up to the rounding to `dtype`. layout: as in
    assemble; with one, quantization packs the packable parameters (see QuantizingSource).
    """
    params, treedef = _params(model, config, dtype)

    def make(param: _Param) -> Leaf:
        values = draw(param)
        source: TensorSource = ArraySource({param.names[0]: values}, param.path)
        if quantization is not None:
            source = QuantizingSource(source, quantization)
        kept = _layout(param, source, param.names[:1], layout)
        if kept is None:
            return values
        return load_packed_param(source, param.names[:1], param.dtype, kept)

    def draw(param: _Param) -> np.ndarray:
        if param.spec.init == "zeros":
            return np.zeros(param.spec.shape, param.dtype)
        if param.spec.init == "ones":
            return np.ones(param.spec.shape, param.dtype)
        noise = standard_noise(f"{seed}:{param.path}", param.spec.shape)
        return aligned_copy(np.float32(NORMAL_STD) * noise, param.dtype)

    return jax.tree.unflatten(treedef, _on_device(make, params, None))


def _params(model: ParameterTree, config: Config, dtype: str) -> tuple[list[_Param], Any]:
    """The leaves in tree order and the tree's structure."""
    specs, treedef = jax.tree_util.tree_flatten_with_path(
        model.param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )
    names, names_treedef = jax.tree.flatten(
        model.weight_names(config), is_leaf=lambda node: isinstance(node, WeightNames)
    )
    if names_treedef != treedef:
        raise ModelLoadError(
            f"model {model.name}: weight_names and param_specs are different trees; "
            "each needs the same keys in the same places"
        )
    params = []
    for (path, spec), own in zip(specs, names, strict=True):
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(spec, ParamSpec) or not isinstance(own, WeightNames) or not own.names:
            raise ModelLoadError(
                f"model {model.name}: {where} needs a ParamSpec in param_specs and a WeightNames "
                "of at least one name in weight_names"
            )
        params.append(_Param(where, spec, own.names, np.dtype(jnp.dtype(spec.dtype or dtype))))
    return params, treedef


def _check_tensors(params: list[_Param], source: TensorSource) -> None:
    """ModelLoadError with every problem of the checkpoint, or nothing."""
    present = set(source.names())
    wanted = {name for param in params for name in param.names}
    missing = [source.label(name) for name in sorted(wanted - present, key=_natural)]
    known = _known_extras(wanted, present)
    surplus = [
        name
        for name in sorted(present - wanted, key=_natural)
        if not known(name) and not may_be_left_over(source, name)
    ]
    misshaped = [
        problem
        for param in params
        if present.issuperset(param.names)
        for problem in _shape_problems(param, source)
    ]
    problems = [
        _listed("missing", missing),
        _listed("not wanted by the model", [source.label(name) for name in surplus]),
        _listed("of another shape", misshaped),
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ModelLoadError(
            f"{source.location}: the tensors do not fit the model. " + " ".join(problems)
        )


def _known_extras(wanted: set[str], present: set[str]) -> Callable[[str], bool]:
    """Tensors that may be left over: computed tables, the output layer of a tied model, and MTP
    modules behind the last layer, which draft or are not used."""
    tied = _EMBEDDING in wanted and _UNEMBEDDING not in wanted
    modules = {name.removesuffix(_MTP_JOIN) for name in present if name.endswith(_MTP_JOIN)}
    unused = tuple(
        prefix for prefix in modules if not any(name.startswith(prefix) for name in wanted)
    )

    def known(name: str) -> bool:
        computed = _NOT_WEIGHTS.fullmatch(name) is not None
        return computed or (tied and name == _UNEMBEDDING) or name.startswith(unused)

    return known


def _shape_problems(param: _Param, source: TensorSource) -> Iterable[str]:
    shapes = [source.shape(name) for name in param.names]
    if len(shapes) == 1:
        joined = shapes[0]
    elif all(len(shape) > 0 and shape[1:] == shapes[0][1:] for shape in shapes):
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    else:
        joined = ()
    if joined != param.spec.shape:
        got = ", ".join(
            f"{source.label(name)} {list(shape)}"
            for name, shape in zip(param.names, shapes, strict=True)
        )
        yield f"{got} for {param.path} {list(param.spec.shape)}"


def _listed(what: str, items: list[str]) -> str:
    if not items:
        return ""
    shown = "; ".join(items[:MAX_LISTED])
    more = f"; and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return f"{len(items)} {what}: {shown}{more}."


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _load_joined(source: TensorSource, param: _Param) -> np.ndarray:
    if len(param.names) == 1:
        only = source.load(param.names[0])
        return only if only.dtype == param.dtype else aligned_copy(only, param.dtype)
    joined = aligned_empty(param.spec.shape, param.dtype)
    row = 0
    for name in param.names:
        part = source.load(name)
        joined[row : row + part.shape[0]] = part
        row += part.shape[0]
    return joined


def _on_device(
    make: Callable[[_Param], Leaf], params: list[_Param], progress: Progress | None
) -> list[Any]:
    """make(param) on worker threads, a few ahead; the results on the device, in order."""
    total = sum(param.size for param in params)
    done, held, last_told = 0, 0, time.monotonic()
    arrays: list[Any] = []
    pending: deque[Future[Leaf]] = deque()
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="weights") as pool:
        for param in params:
            pending.append(pool.submit(make, param))
            if len(pending) < _WORKERS:
                continue
            arrays.append(jax.device_put(pending.popleft().result()))
            done += params[len(arrays) - 1].size
            held += arrays[-1].nbytes
            if progress is not None and time.monotonic() - last_told > _PROGRESS_SECONDS:
                progress(f"weights: {100 * done // total} % read, {held / 1e6:.0f} MB in memory")
                last_told = time.monotonic()
        arrays += [jax.device_put(future.result()) for future in pending]
    return arrays
