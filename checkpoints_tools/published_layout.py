"""A trained tree of params as the tensors that checkpoints of its kind hold."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.base import Config, ParameterTree, Params, WeightNames
from jaxserve.models.llama import LlamaConfig


def named_tensors(
    tree: ParameterTree, config: Config, params: Params, layer: LlamaConfig | None
) -> dict[str, np.ndarray]:
    """The tensors that `assemble` would join to these params, by their names.

    layer: sizes of the attention, for layers that join q, k and v. Params of the tree that are not
    given (d2t, say) are left out.
    """
    names: list[tuple[Any, WeightNames]] = jax.tree_util.tree_leaves_with_path(
        tree.weight_names(config), is_leaf=lambda node: isinstance(node, WeightNames)
    )
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in _leaves(params)}
    tensors = {}
    for path, own in names:
        key = jax.tree_util.keystr(path)
        if key not in leaves:
            continue
        joined = np.asarray(leaves[key])
        rows = [_rows(name, layer) for name in own.names]
        if any(rows):
            parts = np.split(joined, np.cumsum(rows)[:-1])
        else:  # parts alike, as gate and up
            parts = np.split(joined, len(own.names))
        for name, part in zip(own.names, parts, strict=True):
            tensors[name] = np.ascontiguousarray(part)
    return tensors


def _leaves(params: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(params)


def _rows(name: str, layer: LlamaConfig | None) -> int:
    """Rows of a q, k or v among its joint matrix; 0 for anything else."""
    if layer is None:
        return 0
    if ".q_proj." in name:
        return layer.num_heads * layer.head_dim
    if ".k_proj." in name or ".v_proj." in name:
        return layer.num_kv_heads * layer.head_dim
    return 0


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> None:
    """model.safetensors and config.json, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    partial = folder / ".model.safetensors.partial"
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    os.replace(partial, weights)
    write_json(folder / "config.json", config)


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """A JSON object for people and programs, written whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
