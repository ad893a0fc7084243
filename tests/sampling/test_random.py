import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxserve.sampling import random
from jaxserve.sampling.random import ACCEPT, DRAW, threefry2x32
from tests.support import sampling_oracle

# Compiled as a whole: op by op, a hundred small programs would be built.
draw_keys = jax.jit(random.draw_keys)
gumbel = jax.jit(random.gumbel, static_argnums=2)


def words(values):
    return tuple(jnp.uint32(value) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors published with the Random123 library
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word) for word in threefry2x32(words(key), words(counter))) == expected
    assert sampling_oracle.threefry(key, counter) == expected


def test_threefry_equals_jax_own():
    rng = np.random.default_rng(0)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counter = rng.integers(0, 2**32, (2, 500), dtype=np.uint32)
    ours = jax.jit(threefry2x32)(
        (key[0], key[1]), (jnp.asarray(counter[0]), jnp.asarray(counter[1]))
    )
    theirs = threefry_2x32(jnp.asarray(key), jnp.asarray(counter.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate(ours), theirs)


def test_noise_of_a_token_is_the_same_however_it_is_asked_for():
    keys = draw_keys(
        jnp.array([[7, 0], [7, 0], [9, 1]], jnp.uint32), jnp.array([0, 1, 0]), jnp.array([5, 5, 6])
    )
    whole = gumbel(keys, jnp.arange(1000)[None], DRAW)
    some = jnp.array([[999, 3, 0], [500, 1, 2], [3, 3, 3]])
    few = gumbel(keys, some, DRAW)
    np.testing.assert_allclose(few, np.take_along_axis(whole, some, 1), rtol=2e-6, atol=2e-6)
    one = gumbel(keys[1:2], jnp.arange(1000)[None], DRAW)
    np.testing.assert_allclose(one[0], whole[1], rtol=2e-6, atol=2e-6)
    expected = sampling_oracle.noise(9 + 2**32, 0, 6, 1000)
    np.testing.assert_allclose(whole[2], expected, rtol=1e-5, atol=1e-5)


def test_purposes_do_not_share_noise():
    keys = jnp.array([[1, 2]], jnp.uint32)
    ids = jnp.arange(4000)[None]
    draw, other = gumbel(keys, ids, DRAW)[0], gumbel(keys, ids, DRAW + 1)[0]
    assert abs(np.corrcoef(draw, other)[0, 1]) < 0.06


def test_noise_is_finite_and_follows_the_gumbel_law():
    keys = jnp.array([[3, 4]], jnp.uint32)
    sample = np.sort(np.asarray(gumbel(keys, jnp.arange(200_000)[None], DRAW)[0], np.float64))
    assert np.isfinite(sample).all()
    law = np.exp(-np.exp(-sample))
    steps = np.arange(1, len(sample) + 1) / len(sample)
    distance = np.abs(law - steps).max()  # Kolmogorov-Smirnov; 1.95 / sqrt(n) is p = 0.001
    assert distance < 1.95 / np.sqrt(len(sample))


@pytest.mark.parametrize(("bits", "low", "high"), [(0, 22.8, 22.9), (2**32 - 1, -2.9, -2.8)])
def test_extreme_bits_stay_finite(bits, low, high, monkeypatch):
    monkeypatch.setattr(
        random, "threefry2x32", lambda *_: (jnp.full((1, 1), bits, jnp.uint32), None)
    )
    noise = random.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros((1, 1), jnp.int32), DRAW)
    assert low < float(noise[0, 0]) < high


def test_position_and_choice_and_seed_words_all_matter():
    base = ([[1, 2]], [3], [4])
    variants = [base, ([[0, 2]], [3], [4]), ([[1, 0]], [3], [4]), ([[1, 2]], [0], [4]),
                ([[1, 2]], [3], [0]), ([[1, 2]], [4], [3])]  # fmt: skip
    keys = {
        tuple(
            np.asarray(
                draw_keys(jnp.array(seed, jnp.uint32), jnp.array(choice), jnp.array(position))
            )[0]
        )
        for seed, choice, position in variants
    }
    assert len(keys) == len(variants)


def test_uniform_numbers_are_the_generators_for_token_0_and_never_0_or_1(monkeypatch):
    keys = np.random.default_rng(1).integers(0, 2**32, (2000, 2), dtype=np.uint32)
    found = np.asarray(jax.jit(random.uniform, static_argnums=1)(keys, ACCEPT), np.float64)
    words = keys.astype(np.uint64)
    bits, _ = sampling_oracle.threefry((words[:, 0], words[:, 1]), (0, ACCEPT))
    np.testing.assert_allclose(found, bits / 2.0**32, atol=1e-7)
    for extreme in (0, 2**32 - 1):
        monkeypatch.setattr(
            random,
            "threefry2x32",
            lambda *_, bits=extreme: (jnp.full((1, 1), bits, jnp.uint32), None),
        )
        assert 0.0 < float(random.uniform(jnp.zeros((1, 2), jnp.uint32), ACCEPT)[0]) < 1.0
