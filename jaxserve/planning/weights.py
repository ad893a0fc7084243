"""What a model's weights are, by how they are kept, and what a token costs in operations."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.core.program_memory import tree_bytes
from jaxserve.models.base import Config, ModelDef, Params, ParamSpec
from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows


@dataclass(frozen=True)
class WeightKind:
    """All weights that are kept alike. numbers: weights they stand for."""

    name: str
    numbers: int
    num_bytes: int

    @property
    def bits(self) -> float:
        """Bits that a weight takes, scales included."""
        return 8 * self.num_bytes / self.numbers


@dataclass(frozen=True)
class TokenWork:
    """Operations for one token, two for each weight it is multiplied by.

    layers: of all layers; unembed: of the logits, which prefill needs only for a prompt's end.
    """

    layers: int
    unembed: int


def weight_kinds(params: Params) -> tuple[WeightKind, ...]:
    """The kinds of a tree of arrays or shapes, the largest first."""
    numbers: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params, is_leaf=_is_packed):
        for name, count, num_bytes in _pieces(leaf):
            numbers[name] = numbers.get(name, 0) + count
            sizes[name] = sizes.get(name, 0) + num_bytes
    kinds = (WeightKind(name, numbers[name], sizes[name]) for name in sizes)
    return tuple(sorted(kinds, key=lambda kind: -kind.num_bytes))


def token_work(model: ModelDef, config: Config) -> TokenWork:
    """By the model's specs: every matrix multiplies every token, a table of the vocabulary only
    where logits are made."""
    matrices = [
        spec
        for spec in jax.tree.leaves(
            model.param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
        )
        if len(spec.shape) == 2
    ]
    layers = sum(math.prod(spec.shape) for spec in matrices if "vocab" not in spec.axes)
    tables = [math.prod(spec.shape) for spec in matrices if "vocab" in spec.axes]
    return TokenWork(2 * layers, 2 * max(tables, default=0))


def widest_matrix(model: ModelDef, config: Config) -> tuple[int, int]:
    """[out, in] of the layers' matrix with the most outputs."""
    specs = jax.tree.leaves(
        model.param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )
    shapes = [s.shape for s in specs if len(s.shape) == 2 and "vocab" not in s.axes]
    rows, columns = max(shapes, default=(1, 1))
    return rows, columns


def _pieces(leaf: Any) -> Iterator[tuple[str, int, int]]:
    """(how it is kept, numbers, bytes) of a parameter's parts."""
    if isinstance(leaf, StackedRows):
        for piece in leaf.pieces:
            yield from _pieces(piece)
    elif isinstance(leaf, QuantizedArray):
        yield _name(leaf), math.prod(leaf.shape), tree_bytes(leaf)
    else:
        yield np.dtype(leaf.dtype).name, math.prod(leaf.shape), tree_bytes(leaf)


def _name(packed: QuantizedArray) -> str:
    return f"{packed.format_name} packed"


def _is_packed(node: Any) -> bool:
    return isinstance(node, QuantizedArray | StackedRows)
