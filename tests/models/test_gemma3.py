"""Gemma 3: windows, two RoPE bases and soft caps out of both generations of config.json."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.errors import ModelLoadError
from jaxserve.models.gemma3 import MODEL, config_from_hf, scaled_embedding
from tests.support.paged_model import PagedModel, random_params

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 512,
}


def test_absent_entries_have_the_published_defaults() -> None:
    config = config_from_hf(GEMMA)
    assert config.windows == (512,) * 5 + (None, 512)
    assert config.attention_scale == 256**-0.5
    assert config.tied
    assert config.activation == "gelu_pytorch_tanh"
    assert config.global_rope.inv_freq[1] == pytest.approx(1e6**-0.25)
    assert config.local_rope.inv_freq[1] == pytest.approx(1e4**-0.25)
    assert (config.attention_softcap, config.logit_softcap) == (None, None)


def test_kv_groups() -> None:
    spec = MODEL.kv_spec(config_from_hf(GEMMA))
    windowed, everything = spec.groups
    assert (windowed.name, windowed.window, windowed.layers) == (
        "windowed",
        512,
        (0, 1, 2, 3, 4, 6),
    )
    assert (everything.name, everything.window, everything.layers) == ("global", None, (5,))


def test_layer_types_stand_above_the_pattern() -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 6
    config = config_from_hf(GEMMA | {"layer_types": kinds, "sliding_window_pattern": 2})
    assert config.windows == (None,) + (512,) * 6


def test_scaling_concerns_the_global_layers_alone() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config_from_hf(
        GEMMA | {"rope_scaling": scaling, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    )
    new = config_from_hf(
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        }
    )
    assert (old.global_rope, old.local_rope) == (new.global_rope, new.local_rope)
    assert old.global_rope.inv_freq[0] == 0.125
    assert old.local_rope.inv_freq[:2] == pytest.approx((1.0, 2e4**-0.25))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": None}, ["sliding_window", "6 layers"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"hidden_activation": "geglu"}, ["hidden_activation", "geglu"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "full_attention"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "su"}}}, ["su"]),
        ({"rope_local_base_freq": 0}, ["rope_theta"]),
        ({"query_pre_attn_scalar": -1}, ["query_pre_attn_scalar"]),
        ({"final_logit_softcapping": "x"}, ["final_logit_softcapping"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        config_from_hf(GEMMA | change)
    assert all(word in str(error.value) for word in words), error.value


def test_each_kind_of_layer_gets_its_window_and_softcap() -> None:
    config = config_from_hf(
        GEMMA
        | {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 3}
        | {"attn_logit_softcapping": 50.0}
    )
    run = PagedModel(MODEL, config, random_params(MODEL, config))
    attend, seen = run.ops.attend, []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append((args[0], options["window"], options["softcap"], options["scale"]))
        return attend(*args, **options)

    run.ops = replace(run.ops, attend=watched)
    run.whole([1, 2, 3, 4, 5])
    assert seen == [(0, 3, 50.0, 1 / 16), (1, None, 50.0, 1 / 16)]


def test_scale_of_embeddings_is_rounded_to_the_weights_type() -> None:
    ops = make_ops("reference", KVSpec((KVGroup("global", (0,), 1, 4),)))
    for dtype, scale in ((jnp.float32, np.float32(640**0.5)), (jnp.bfloat16, 25.25)):
        got = scaled_embedding(ops, jnp.ones((3, 640), dtype), jnp.asarray([0, 2]))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.full((2, 640), scale, np.float32))


def test_bfloat16_follows_float32() -> None:
    config = config_from_hf(GEMMA | {"num_hidden_layers": 1})
    params = random_params(MODEL, config)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = PagedModel(MODEL, config, half).whole([5, 1, 40, 7])
    exact = PagedModel(MODEL, config, params).whole([5, 1, 40, 7])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, exact, atol=0.15)
    assert np.abs(got - exact).max() > 0
