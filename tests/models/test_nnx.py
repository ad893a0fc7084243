"""from_nnx: names and shapes come from the module; what a step could change is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import ModelDef, ParamSpec, WeightNames
from jaxserve.models.nnx import from_nnx
from jaxserve.models.user_file import import_model_file
from tests.support.paged_model import PagedModel

EXAMPLE = import_model_file(Path(__file__).resolve().parents[2] / "examples" / "nnx_model.py")


@dataclass(frozen=True)
class Config:
    vocab_size: int = 7
    max_position_embeddings: int = 16
    dropout: bool = False


class Toy(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocab_size, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        if config.dropout:
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
        heads = self.norm(self.embed(tokens)).reshape(-1, 2, 4)
        return attend(0, heads, heads, heads, scale=0.5).reshape(-1, 8)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        return self.embed.attend(hidden)


def _toy(**options: Any) -> ModelDef:
    spec = KVSpec((KVGroup("global", (0,), 2, 4),))
    return from_nnx(
        "toy", config_from_hf=lambda hf: Config(), build=Toy, kv_spec=lambda _: spec, **options
    )


def test_params_are_named_by_their_path() -> None:
    assert _toy().param_specs(Config()) == {
        "embed.embedding": ParamSpec((7, 8), (None, None), "normal"),
        "norm.bias": ParamSpec((8,), (None,), "zeros"),
        "norm.scale": ParamSpec((8,), (None,), "ones"),
    }
    assert _toy().weight_names(Config())["norm.scale"] == WeightNames(("norm.scale",))


def test_tensor_names_of_a_checkpoint_may_differ() -> None:
    renamed = _toy(tensor_name=lambda path: "/".join(map(str, path)))
    assert renamed.weight_names(Config())["norm.scale"] == WeightNames(("norm/scale",))


def test_state_that_a_step_would_change_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"not nnx\.Param: dropout\.rngs.*without dropout"):
        _toy().param_specs(Config(dropout=True))


def test_the_example_gives_what_the_module_itself_gives() -> None:
    """The module called outside the engine, with dense causal attention in its hands."""
    config = EXAMPLE.config_from_hf(EXAMPLE.TEST_CONFIG)
    module = EXAMPLE.Decoder(config, nnx.Rngs(3))
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    params = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 21)

    def dense(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> jax.Array:
        q, k, v = q[None], k[None], v[None]
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)[0]

    hidden = module(jax.numpy.asarray(tokens), jax.numpy.arange(21), dense)
    got = PagedModel(EXAMPLE.MODEL, config, params).whole(tokens.tolist())
    np.testing.assert_allclose(got, module.unembed(hidden), atol=1e-5, rtol=1e-5)
