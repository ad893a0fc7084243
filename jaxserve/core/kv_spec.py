"""What a model tells the engine about its key-value cache. Plain Python: no jax."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep keys and values of one shape under one page table.

    name: "global", "windowed", ...; layers: the model's layer indices, in order;
    window: tokens a query may look back on, itself included, or None for all.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """All KV groups of a model. Every layer is in exactly one group."""

    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))):
            raise ValueError(f"KV groups must name each layer once, got layers {layers}")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def group_of_layer(self, layer: int) -> int:
        """Index of the group that `layer` belongs to."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index
        raise KeyError(f"layer {layer} is in no KV group")

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of pool memory one token costs: keys and values of every layer.

        Numbers of one byte (int8) share a scale of four bytes per head.
        """
        scale = 4 if itemsize == 1 else 0
        return sum(
            2 * len(group.layers) * group.num_kv_heads * (group.head_dim * itemsize + scale)
            for group in self.groups
        )
