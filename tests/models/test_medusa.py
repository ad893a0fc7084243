"""Medusa heads against their formula in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.errors import ModelLoadError
from jaxserve.models.drafts import medusa
from tests.support import draft_oracle as oracle
from tests.support.draft_checkpoints import BLOCKS, HEADS, TARGET, medusa_tensors
from tests.support.paged_model import params_of_tensors

CONFIG = {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS}
OPS = make_ops("reference", KVSpec((KVGroup("global", (0,), 1, 8),)))


@pytest.mark.parametrize("shared", [False, True])
def test_logits_are_the_formulas(shared: bool) -> None:
    tensors = medusa_tensors(unembed=not shared)
    config = medusa.config_from_hf(CONFIG, TARGET, shared)
    params = params_of_tensors(medusa.MEDUSA, config, tensors)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((5, 32)).astype(np.float32)
    table = rng.standard_normal((TARGET.vocab_size, 32)).astype(np.float32)
    logits = medusa.heads(config, params, hidden, lambda states: states @ jnp.asarray(table).T, OPS)
    assert logits.shape == (HEADS, 5, TARGET.vocab_size)
    assert logits.dtype == jnp.float32
    want = oracle.medusa(tensors, hidden, HEADS, BLOCKS, table if shared else None)
    np.testing.assert_allclose(logits, want, atol=2e-5, rtol=2e-5)


def test_names_are_the_published_ones() -> None:
    config = medusa.config_from_hf(CONFIG, TARGET)
    head = medusa.weight_names(config)["heads"][1]
    assert [block["weight"].names for block in head["blocks"]] == [
        ("1.0.linear.weight",),
        ("1.1.linear.weight",),
    ]
    assert head["unembed"].names == ("1.2.weight",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size of the Medusa heads is 64, the target's is 32"),
        ({"vocab_size": 95}, "vocab_size of the Medusa heads is 95, the target's is 96"),
        ({"medusa_num_heads": 17}, "medusa_num_heads is 17; want a whole number 1 to 16"),
        ({"medusa_num_heads": None}, "medusa_num_heads is None"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        medusa.config_from_hf(CONFIG | change, TARGET)
