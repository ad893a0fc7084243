"""Which layers share a page table, and which share arrays of the pool. Plain Python: no jax.

A model's layers are cut into table groups of equally many layers, all of one window. The j-th
layers of all groups share the j-th pair of arrays, each group under its own page ids. So a page
(one id) costs the same bytes whoever holds it: `num_arrays` times a page of keys and of values.
Any group may take any free page, and a group whose window has passed a page gives it to whoever
needs one. With one kind of layer there is one group, and each layer has arrays of its own.

Group size. Counts that have no common divisor need padding: a group short of layers leaves some
arrays of its pages unused, in every request. Small groups waste less, but each is one more table
[rows, pages] to fill, to send and to keep for every request. So the size taken is the one for
which padding / layers + groups / 64 is least: a further table must save a 64th of the memory.
Gemma 3 of 15 windowed and 3 global layers: 6 groups of 3; of 22 and 4: 7 groups of 4, with two
places of 28 empty, where groups of 2 would be 13 tables; of 52 and 10: 5 groups of 13.

Layers whose keys differ in shape cannot share arrays. They stay under one table, with arrays of
their own: an id then stands for that page in all of them, and pages are given back only if every
layer is windowed, at the widest window. Kinds of KV that come later fit in the same way: latent
KV is one more shape, and the layers of a draft model, which cover the same tokens, are more layers.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import batched

from jaxserve.core.kv_spec import KVSpec

_TABLES_PER_POOL = 64  # as many tables as weigh as much as the whole pool, when sizes are chosen
_SCALE_BYTES = 4


@dataclass(frozen=True)
class TableGroup:
    """Layers under one page table. window: the most tokens one of them looks back, the query
    itself included; None: one of them sees everything. The group's j-th layer uses the pool's
    j-th pair of arrays."""

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class ArrayShape:
    """Of a pair of arrays [num_pages, page_size, num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """Hashable by value. tables: every layer is in exactly one; arrays: at least as many as the
    largest has layers."""

    tables: tuple[TableGroup, ...]
    arrays: tuple[ArrayShape, ...]

    @property
    def num_tables(self) -> int:
        return len(self.tables)

    @property
    def num_arrays(self) -> int:
        """Pairs of arrays, of keys and of values."""
        return len(self.arrays)

    @property
    def num_layers(self) -> int:
        return sum(len(table.layers) for table in self.tables)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each table group."""
        return tuple(table.window for table in self.tables)

    @cached_property
    def table_of_layer(self) -> tuple[int, ...]:
        """Of each layer, the index of its table group."""
        tables = {x: index for index, table in enumerate(self.tables) for x in table.layers}
        return tuple(tables[layer] for layer in range(self.num_layers))

    @cached_property
    def array_of_layer(self) -> tuple[int, ...]:
        """Of each layer, the index of its pair of arrays."""
        arrays = {x: index for table in self.tables for index, x in enumerate(table.layers)}
        return tuple(arrays[layer] for layer in range(self.num_layers))

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes one page id stands for, in all arrays.

        Numbers of one byte (int8) come with a float32 scale for each token and head.
        """
        scale = _SCALE_BYTES if itemsize == 1 else 0
        token = sum(2 * x.num_kv_heads * (x.head_dim * itemsize + scale) for x in self.arrays)
        return page_size * token

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token that every group still holds, padding included."""
        return self.num_tables * self.page_bytes(1, itemsize)


def kv_layout(spec: KVSpec) -> KVLayout:
    """The layout of a model's KV (see the top of this file)."""
    shapes = {ArrayShape(group.num_kv_heads, group.head_dim) for group in spec.groups}
    if len(shapes) > 1:
        return single_table(spec)
    by_window: dict[int | None, list[int]] = {}
    for layer in range(spec.num_layers):
        group = spec.groups[spec.group_of_layer(layer)]
        by_window.setdefault(group.window, []).append(layer)
    size = _group_size([len(layers) for layers in by_window.values()])
    tables = tuple(
        TableGroup(part, window)
        for window, layers in by_window.items()
        for part in batched(layers, size)
    )
    return KVLayout(tables, tuple(shapes) * size)


def single_table(spec: KVSpec) -> KVLayout:
    """All layers under one table, each with its own arrays: always possible."""
    groups = [spec.groups[spec.group_of_layer(layer)] for layer in range(spec.num_layers)]
    windows = [group.window for group in groups]
    widest = None if None in windows else max(window for window in windows if window is not None)
    shapes = tuple(ArrayShape(group.num_kv_heads, group.head_dim) for group in groups)
    return KVLayout((TableGroup(tuple(range(spec.num_layers)), widest),), shapes)


def _group_size(counts: list[int]) -> int:
    """Layers a group holds, of kinds with so many layers each; the larger of two equally good."""
    total = sum(counts)

    def cost(size: int) -> float:
        groups = sum(-(-count // size) for count in counts)
        return (groups * size - total) / total + groups / _TABLES_PER_POOL

    return min(range(max(counts), 0, -1), key=cost)
