"""RoPE (B24): frequencies against transformers and by hand, angles up to the last position."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.layers.rope import Rope, cos_and_sin
from jaxserve.layers.rope_scaling import make_rope
from pallas_kernels.rope import rotate

RULES = json.loads((Path(__file__).parents[1] / "goldens" / "rope" / "rules.json").read_text())
LLAMA3 = {
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _default(head_dim: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_b24_llama3_divides_long_wavelengths_only(key: str) -> None:
    rope = make_rope({**LLAMA3, key: "llama3"}, 64, 131072)
    divisor = _default(64, 5e5) / np.asarray(rope.inv_freq)
    np.testing.assert_allclose(divisor[:15], 1.0, rtol=1e-12)
    np.testing.assert_allclose(divisor[15:18], [1.651329, 3.292262, 9.666729], rtol=1e-6)
    np.testing.assert_allclose(divisor[18:], 32.0, rtol=1e-12)


def test_b24_gguf_factors_are_divisors() -> None:
    factors = np.linspace(1.0, 32.0, 32).tolist()
    parameters = {"rope_type": "factors", "factors": factors, "rope_theta": 500000.0}
    rope = make_rope(parameters, 64, 131072)
    np.testing.assert_allclose(rope.inv_freq, _default(64, 5e5) / factors, rtol=1e-12)
    assert rope.attention_scaling == 1.0


@pytest.mark.parametrize("name", [name for name in RULES["rules"] if name != "dynamic"])
def test_b24_frequencies_are_those_of_transformers(name: str) -> None:
    rule = RULES["rules"][name]
    rope = make_rope(rule["parameters"], rule["head_dim"], rule["max_position_embeddings"])
    (want,) = rule["inv_freq"].values()
    np.testing.assert_allclose(rope.inv_freq, want, rtol=5e-6)  # they compute in float32
    assert rope.attention_scaling == pytest.approx(rule["attention_scaling"], rel=1e-12)


def test_b24_dynamic_gives_each_position_the_frequencies_of_its_length() -> None:
    rule = RULES["rules"]["dynamic"]
    rope = make_rope(rule["parameters"], rule["head_dim"], rule["max_position_embeddings"])
    for length, want in rule["inv_freq"].items():
        position = int(length) - 1
        cos, sin = cos_and_sin(rope, jnp.asarray([position]))
        angle = position * np.asarray(want)
        np.testing.assert_allclose(cos[0], np.cos(angle), atol=2e-3)
        np.testing.assert_allclose(sin[0], np.sin(angle), atol=2e-3)


def test_b24_dynamic_changes_no_bit_within_the_trained_context() -> None:
    scaled = make_rope({"rope_type": "dynamic", "factor": 4.0}, 64, 2048)
    plain = make_rope({"rope_type": "default"}, 64, 2048)
    positions = jnp.asarray([0, 1, 100, 2047])
    for got, want in zip(
        cos_and_sin(scaled, positions), cos_and_sin(plain, positions), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_b24_dynamic_key_depends_on_its_own_position_alone() -> None:
    rope = make_rope({"rope_type": "dynamic", "factor": 4.0}, 64, 128)
    alone = cos_and_sin(rope, jnp.asarray([200, 201]))
    among = cos_and_sin(rope, jnp.asarray([5, 200, 201, 500]))
    for got, want in zip(among, alone, strict=True):
        np.testing.assert_array_equal(got[1:3], want)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {**LLAMA3, "rope_type": "llama3"},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_b24_angles_are_finite_and_accurate_at_the_last_position(
    parameters: dict[str, Any],
) -> None:
    last = 131072 - 1
    rope = make_rope(parameters, 64, 131072)
    cos, sin = (np.asarray(x)[0] for x in cos_and_sin(rope, jnp.asarray([last])))
    angle = np.float32(last) * np.asarray(rope.inv_freq, np.float32)  # rounded as in training
    np.testing.assert_allclose(cos, rope.attention_scaling * np.cos(angle.astype(float)), atol=1e-6)
    np.testing.assert_allclose(sin, rope.attention_scaling * np.sin(angle.astype(float)), atol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "wanted_words"),
    [
        ({"rope_type": "su"}, ["su", "llama3"]),
        ({"type": "mrope"}, ["mrope"]),
        ({"rope_type": ["yarn"]}, ["rope_type"]),
        ({"rope_type": "linear"}, ["factor", "None"]),
        ({"rope_type": "linear", "factor": 0}, ["factor", "0"]),
        ({"rope_type": "linear", "factor": math.nan}, ["factor", "nan"]),
        ({"rope_type": "dynamic", "factor": True}, ["factor", "True"]),
        ({"rope_type": "linear", "factor": 10**400}, ["factor"]),
        ({"rope_theta": "10000"}, ["rope_theta"]),
        ({**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1.0}, ["high_freq_factor"]),
        ({"rope_type": "factors"}, ["factors", "32"]),
        ({"rope_type": "factors", "factors": [1.0] * 31}, ["31", "32"]),
        ({"rope_type": "factors", "factors": [0.0] * 32}, ["above 0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_b24_what_cannot_be_computed_is_refused(
    parameters: dict[str, Any], wanted_words: list[str]
) -> None:
    with pytest.raises(ModelLoadError) as error:
        make_rope(parameters, 64, 4096)
    message = str(error.value)
    assert all(word in message for word in wanted_words), message
    assert len(message) < 300


@pytest.mark.parametrize("head_dim", [2, 7])
def test_head_dim_that_has_no_pairs_is_refused(head_dim: int) -> None:
    with pytest.raises(ModelLoadError, match="head_dim"):
        make_rope({}, head_dim, 4096)


def test_rotate_turns_the_pairs_i_and_i_plus_half() -> None:
    rope = Rope((1.0, 0.25))
    x = np.asarray([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]], np.float32)
    positions = np.asarray([0, 3])
    got = rotate(jnp.asarray(x), *cos_and_sin(rope, jnp.asarray(positions)))
    np.testing.assert_allclose(got[0], x[0])
    turned = (x[1, 0, :2] + 1j * x[1, 0, 2:]) * np.exp(1j * 3 * np.asarray(rope.inv_freq))
    np.testing.assert_allclose(got[1, 0], np.concatenate([turned.real, turned.imag]), rtol=1e-6)
