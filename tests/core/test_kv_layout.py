"""How layers are grouped under page tables, and what a page costs."""

import jax
import numpy as np
import pytest

from jaxserve.core.kv_layout import KVLayout, TableGroup, kv_layout, single_table
from jaxserve.core.kv_pool import pool_shapes
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.models.windows import group_by_window


def spec_of(windowed: int, whole: int, window: int = 512) -> KVSpec:
    """Windowed layers with a global one after every few, as Gemma has them."""
    per = -(-windowed // whole)
    windows: list[int | None] = []
    for _ in range(whole):
        windows += [window] * min(per, windowed - windows.count(window)) + [None]
    return group_by_window(windows, 2, 8)


@pytest.mark.parametrize(
    ("windowed", "whole", "tables", "size"),
    [(15, 3, 6, 3), (22, 4, 7, 4), (29, 5, 7, 5), (40, 8, 6, 8), (52, 10, 5, 13), (12, 12, 2, 12)],
)
def test_group_sizes(windowed: int, whole: int, tables: int, size: int) -> None:
    layout = kv_layout(spec_of(windowed, whole))
    assert (layout.num_tables, layout.num_arrays) == (tables, size)


@pytest.mark.parametrize("counts", [(15, 3), (22, 4), (5, 1), (1, 1), (7, 3)])
def test_every_layer_has_one_table_of_its_window_and_an_array_of_its_own_there(
    counts: tuple[int, int],
) -> None:
    spec = spec_of(*counts)
    layout = kv_layout(spec)
    assert layout.num_layers == spec.num_layers == sum(counts)
    for layer in range(spec.num_layers):
        window = spec.groups[spec.group_of_layer(layer)].window
        assert layout.windows[layout.table_of_layer[layer]] == window
    places = set(zip(layout.table_of_layer, layout.array_of_layer, strict=True))
    assert len(places) == spec.num_layers
    assert max(layout.array_of_layer) < layout.num_arrays


@pytest.mark.parametrize("window", [None, 32])
def test_layers_of_one_kind_have_one_table_and_arrays_of_their_own(window: int | None) -> None:
    layout = kv_layout(group_by_window([window] * 30, 2, 8))
    assert layout.tables == (TableGroup(tuple(range(30)), window),)
    assert layout.array_of_layer == tuple(range(30))


@pytest.mark.parametrize(("windows", "kept"), [((None, 8), None), ((4, 8), 8), ((4, None), None)])
def test_layers_of_different_shapes_stay_under_one_table(
    windows: tuple[int | None, int | None], kept: int | None
) -> None:
    """It gives back only what no layer sees."""
    spec = KVSpec((KVGroup("a", (0, 2), 2, 8, windows[0]), KVGroup("b", (1,), 1, 16, windows[1])))
    layout = kv_layout(spec)
    assert layout == single_table(spec)
    assert layout.tables == (TableGroup((0, 1, 2), kept),)
    assert [(x.num_kv_heads, x.head_dim) for x in layout.arrays] == [(2, 8), (1, 16), (2, 8)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("make", [kv_layout, single_table])
def test_bytes_are_those_of_the_pool(make: object, dtype: str) -> None:
    spec = spec_of(15, 3)
    layout = make(spec)
    assert isinstance(layout, KVLayout)
    pool = pool_shapes(layout, 7, 16, np.dtype(dtype))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    itemsize = np.dtype(dtype).itemsize
    assert total == 7 * layout.page_bytes(16, itemsize)
    assert layout.bytes_per_token(itemsize) == spec.bytes_per_token(itemsize)


def test_padding_is_counted() -> None:
    spec = spec_of(22, 4)
    assert kv_layout(spec).bytes_per_token(4) * 26 == spec.bytes_per_token(4) * 28


def test_layouts_are_compared_by_value() -> None:
    first, second = kv_layout(spec_of(15, 3)), kv_layout(spec_of(15, 3))
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
