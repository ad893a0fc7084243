"""Layers that look back different distances keep their KV in different groups."""

from collections.abc import Sequence

from jaxserve.core.kv_spec import KVGroup, KVSpec


def group_by_window(windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> KVSpec:
    """A KV group for each distinct window (None: sees everything), in order of appearance."""
    groups = []
    for window in dict.fromkeys(windows):
        layers = tuple(layer for layer, own in enumerate(windows) if own == window)
        name = "global" if window is None else "windowed"
        groups.append(KVGroup(name, layers, num_kv_heads, head_dim, window))
    return KVSpec(tuple(groups))
