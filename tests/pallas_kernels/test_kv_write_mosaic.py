"""kv_write's kernel in interpretation: the reference's bits, and no other byte is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.mesh import replicated
from jaxserve.planning.h200 import h200_mesh
from pallas_kernels.kv_write import write_kv
from pallas_kernels.kv_write.mosaic_gpu import TILES, Tiles, pick_tiles, write_kv_mosaic
from tests.support.sm90a import compile_sm90a, lower_cuda

pytestmark = pytest.mark.interpreted

LAYERS, PAGES, HEADS = 2, 4, 2
KINDS = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)


def pool(dtype: jnp.dtype, page_size: int, D: int, seed: int = 0) -> list[jax.Array | None]:
    """Key pages, value pages and scales full of random bytes: every one is somebody's."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, PAGES, HEADS, page_size, D)
    narrow = jnp.dtype(dtype).itemsize == 1

    def noise(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.integers(-100, 100, shape).astype(np.float32)).astype(dtype)

    values = noise((*shape[:3], D, page_size) if narrow else shape)
    scales = [jnp.asarray(rng.random(shape[:4], np.float32)) if narrow else None] * 2
    return [noise(shape), values, *scales]


def tokens(T: int, D: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((T, HEADS, D)), jnp.bfloat16) for _ in range(2))
    return k, v


def by_reference(before: list, k: jax.Array, v: jax.Array, slots: jax.Array, layer: int) -> list:
    """The same write by `write_kv`, whose layer of the pool lies [N, page, K, D]."""
    narrow = before[2] is not None
    keys = before[0][layer].transpose(0, 2, 1, 3)
    values = before[1][layer].transpose((0, 3, 1, 2) if narrow else (0, 2, 1, 3))
    scales = {}
    if narrow:
        scales = {
            name: x[layer].transpose(0, 2, 1)
            for name, x in zip(("key_scales", "value_scales"), before[2:], strict=True)
        }
    keys, values, *new_scales = jax.jit(write_kv)(keys, values, k, v, slots, **scales)
    after = [
        before[0].at[layer].set(keys.transpose(0, 2, 1, 3)),
        before[1].at[layer].set(values.transpose((0, 2, 3, 1) if narrow else (0, 2, 1, 3))),
    ]
    for old, new in zip(before[2:], new_scales or (None, None), strict=True):
        after.append(None if new is None else old.at[layer].set(new.transpose(0, 2, 1)))
    return after


def same_bits(got: list, want: list) -> None:
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
            )


def write(
    before: list, k: jax.Array, v: jax.Array, slots: list[int], layer: int, **options
) -> list:
    return list(
        write_kv_mosaic(
            before[0],
            before[1],
            k,
            v,
            jnp.asarray(slots, jnp.int32),
            jnp.asarray([layer], jnp.int32),
            key_scales=before[2],
            value_scales=before[3],
            interpret=True,
            **options,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "page_size", "D", "slots"),
    [
        (jnp.bfloat16, 64, 128, [64 + 63, -1, 5]),
        (jnp.bfloat16, 128, 96, [3 * 128 + 127]),
        (jnp.int8, 16, 64, [17, 18, 31, 32]),
        (jnp.int8, 64, 256, [200]),
        (jnp.int8, 32, 80, [-1, 127]),
        (jnp.float8_e4m3fn, 64, 128, [64 + 63, -1, 5]),
        (jnp.float8_e4m3fn, 16, 80, [33, 34]),
    ],
)
def test_writes_what_the_reference_writes(dtype, page_size: int, D: int, slots: list[int]):
    before = pool(dtype, page_size, D)
    k, v = tokens(len(slots), D)
    got = write(before, k, v, slots, layer=1)
    same_bits(got, by_reference(before, k, v, jnp.asarray(slots), layer=1))


def test_several_tokens_a_block_change_no_bit():
    before = pool(jnp.int8, 16, 64)
    k, v = tokens(4, 64)
    slots = [20, 21, -1, 3]
    one, four = (write(before, k, v, slots, 0, tiles=Tiles(1, n, "")) for n in (1, 4))
    same_bits(one, four)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=lambda d: jnp.dtype(d).name)
def test_numbers_that_are_tiny_zero_or_not_finite(dtype):
    k, v = tokens(6, 64)
    k = k.at[0, 0].set(0).at[1, 1].set(1e-40).at[2, 0, 7].set(jnp.nan).at[3, 1, 63].set(-jnp.inf)
    v = v.at[4].set(3e38).at[5, 0, 0].set(-jnp.nan)
    before = pool(dtype, 16, 64)
    slots = [16, 17, 18, 19, 20, 21]
    got = write(before, k, v, slots, layer=0)
    want = by_reference(before, k, v, jnp.asarray(slots), layer=0)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert np.isnan(np.asarray(got[2])[0, 1, 0, 2])
    assert np.isnan(np.asarray(got[3])[0, 1, 0, 5])


def test_rotates_keys_before_it_writes_them():
    T, D = 3, 80
    rng = np.random.default_rng(2)
    angles = rng.uniform(-500, 500, (T, D // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v = tokens(T, D)
    before = pool(jnp.bfloat16, 16, D)
    got = write(before, k, v, [16, 17, 18], 1, cos=jnp.asarray(cos), sin=jnp.asarray(sin))
    first, second = np.split(np.asarray(k, np.float64), 2, axis=-1)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    want = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    written = np.asarray(got[0][1, 1, :, :3], np.float64).transpose(1, 0, 2)
    assert np.abs(written - want).max() < 2**-8 * np.abs(want).max()
    same_bits(got[1:], by_reference(before, k, v, jnp.asarray([16, 17, 18]), 1)[1:])
    # Quantising comes after rotating, on the key as a bfloat16 pool would hold it.
    narrow = pool(jnp.int8, 16, D)
    turned = got[0][1, 1, :, :3].transpose(1, 0, 2)
    got = write(narrow, k, v, [16, 17, 18], 1, cos=jnp.asarray(cos), sin=jnp.asarray(sin))
    same_bits(got, by_reference(narrow, turned, v, jnp.asarray([16, 17, 18]), 1))


def test_tokens_without_a_slot_write_nothing():
    before = pool(jnp.int8, 16, 64)
    k, v = tokens(4, 64)
    same_bits(write(before, k * jnp.nan, v, [-1] * 4, 0), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_pages": np.zeros((2, 4, 2, 16, 64), np.int8)}, "8-bit values lie transposed"),
        ({"key_scales": None}, "for 8-bit pages and None for others"),
        ({"k": np.zeros((3, 1, 64), np.float32)}, r"want both \[tokens, 2, 64\]"),
        ({"cos": np.zeros((3, 64), np.float32)}, r"want both \(3, 32\) or neither"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict, message: str):
    before = pool(jnp.int8, 16, 64)
    k, v = tokens(3, 64)
    names = ("key_pages", "value_pages", "key_scales", "value_scales")
    given = dict(zip(names, before, strict=True)) | {"k": k, "v": v} | change
    with pytest.raises(ValueError, match=message):
        write_kv_mosaic(**given, write_slot=jnp.zeros(3, jnp.int32), layer=jnp.zeros(1, jnp.int32))


def test_every_size_has_a_row_with_a_reason():
    assert pick_tiles(64, 8).tokens == 1
    assert pick_tiles(8192, 8).tokens > 1
    assert all(row.reason for row in TILES)


def arguments(dtype, page_size: int, D: int, T: int = 16, K: int = HEADS) -> tuple:
    """Shapes of a call of `rotated_write`."""
    pages = jax.eval_shape(lambda: pool(dtype, page_size, D))
    token = jax.ShapeDtypeStruct((T, K, D), jnp.bfloat16)
    angle = jax.ShapeDtypeStruct((T, D // 2), jnp.float32)
    integers = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (T, 1))
    return (pages, token, token, *integers, angle, angle)


def rotated_write(pages, k, v, slots, layer, cos, sin):
    return write_kv_mosaic(
        pages[0],
        pages[1],
        k,
        v,
        slots,
        layer,
        key_scales=pages[2],
        value_scales=pages[3],
        cos=cos,
        sin=sin,
    )


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("D", [64, 80, 96, 128, 192, 256])
def test_lowers_for_cuda(dtype, D: int):
    assert "mosaic_gpu" in lower_cuda(rotated_write, *arguments(dtype, 64, D)).as_text()


@pytest.mark.sm90a
@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("D", [80, 128])
def test_compiles_for_hopper(dtype, D: int):
    (kernel,) = compile_sm90a(rotated_write, *arguments(dtype, 64, D)).kernels
    assert kernel.registers <= 64


@pytest.mark.sm90a
def test_layers_in_a_loop_write_in_place():
    """Copying a pool would cost more than all else in a step."""

    def step(pages, k, v, slots, layer, cos, sin):
        def one(carry, index):
            return list(rotated_write(carry, k, v, slots, index, cos, sin)), None

        return jax.lax.scan(one, pages, jnp.arange(LAYERS, dtype=jnp.int32)[:, None])[0]

    mesh = h200_mesh()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        arguments(jnp.int8, 64, 128),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step, donate_argnums=0).trace(*shapes).lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 1024
