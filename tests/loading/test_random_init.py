"""Weights from a seed are the same everywhere, or the goldens are worth nothing."""

import hashlib

import numpy as np

from jaxserve.loading.random_init import random_tensors, standard_noise

DIGEST = "399271655ce0d387cbf57bf23f50ea79b6764aaa222695b6eb556aa0603eccf1"


def test_bits_are_pinned() -> None:
    """Frozen digest: a change here changes every golden without anyone noticing why."""
    noise = standard_noise("0:model.embed_tokens.weight", (101, 48))
    assert noise.dtype == np.float32
    digest = hashlib.sha256(noise.astype("<f4").tobytes()).hexdigest()
    assert digest == DIGEST


def test_noise_has_mean_0_and_deviation_1() -> None:
    noise = standard_noise("moments", (200, 1000)).astype(float)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    kurtosis = (noise**4).mean() / (noise**2).mean() ** 2
    assert abs(kurtosis - 2.7) < 0.05  # of a sum of four uniforms; 3 would be a normal's


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    shapes = {"a.weight": (4, 6), "b.weight": (4, 6)}
    both = random_tensors(shapes, 7)
    alone = random_tensors({"b.weight": (4, 6)}, 7)
    np.testing.assert_array_equal(both["b.weight"], alone["b.weight"])
    assert not np.array_equal(both["a.weight"], both["b.weight"])
    assert not np.array_equal(random_tensors(shapes, 8)["a.weight"], both["a.weight"])


def test_norms_lie_around_their_center_and_matrices_keep_scale() -> None:
    shapes = {"x.norm.weight": (4000,), "x.q_proj.weight": (100, 400), "x.q_proj.bias": (4000,)}
    for center in (0.0, 1.0):
        drawn = random_tensors(shapes, 0, center)
        assert abs(drawn["x.norm.weight"].mean() - center) < 0.01
        assert abs(drawn["x.norm.weight"].std() - 0.1) < 0.01
        assert abs(drawn["x.q_proj.weight"].std() - 0.05) < 0.001
        assert abs(drawn["x.q_proj.bias"].mean()) < 0.01
