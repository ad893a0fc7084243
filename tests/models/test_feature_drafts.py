"""EAGLE, EAGLE-3 and MTP modules over a paged pool, against their formulas in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.errors import ModelLoadError
from jaxserve.models.base import ModelDef, layer_input
from jaxserve.models.drafts.base import FeatureDraft, TargetSizes, target_sizes
from jaxserve.models.drafts.eagle import EAGLE
from jaxserve.models.drafts.eagle3 import EAGLE3
from jaxserve.models.drafts.mtp import MTP
from jaxserve.models.registry import find_model
from tests.support import draft_oracle as oracle
from tests.support.draft_checkpoints import (
    DRAFT_VOCABULARY,
    LAYER,
    TARGET,
    draft_words,
    eagle3_tensors,
    eagle_tensors,
    layer_shapes,
    random_tensors,
)
from tests.support.paged_model import (
    PagedModel,
    PagedSequence,
    params_of_tensors,
    random_params,
)

LENGTH, CHUNK = 20, 8
MTP_PREFIX = f"model.layers.{TARGET.num_layers}."


@dataclass(frozen=True)
class Case:
    """oracle: the formula of the next features."""

    draft: FeatureDraft
    json_config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    oracle: Callable[..., np.ndarray]


def mtp_tensors() -> dict[str, np.ndarray]:
    """One module, under the names it has behind the target's last layer."""
    norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
    shapes = layer_shapes() | {f"{norm}.weight": (32,) for norm in norms}
    shapes["eh_proj.weight"] = (32, 64)
    return {MTP_PREFIX + name: values for name, values in random_tensors(shapes, 5).items()}


def mtp_features(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *inputs: np.ndarray
) -> np.ndarray:
    """The oracle's result is normed already; see test_logits_of_an_mtp_module."""
    return oracle.mtp(config, _without_prefix(tensors), *inputs)


def _without_prefix(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(MTP_PREFIX): values for name, values in tensors.items()}


def qkv_bias_tensors() -> dict[str, np.ndarray]:
    """EAGLE for Qwen2, whose layer has biases on q, k and v, and no bias of fc."""
    shapes = {f"layers.0.{name}": shape for name, shape in layer_shapes(bias=True).items()}
    return random_tensors(shapes | {"fc.weight": (32, 64)}, 3)


CASES = {
    "eagle": Case(EAGLE, LAYER, eagle_tensors(), oracle.eagle),
    "eagle-two-layers": Case(
        EAGLE,
        LAYER | {"num_hidden_layers": 2, "bias": False},
        eagle_tensors(2, fc_bias=False),
        oracle.eagle,
    ),
    "eagle-qkv-bias": Case(
        EAGLE, LAYER | {"qkv_bias": True, "bias": False}, qkv_bias_tensors(), oracle.eagle
    ),
    "eagle3": Case(
        EAGLE3, LAYER | {"draft_vocab_size": DRAFT_VOCABULARY}, eagle3_tensors(), oracle.eagle3
    ),
    "mtp": Case(
        MTP,
        LAYER | {"num_hidden_layers": TARGET.num_layers, "num_nextn_predict_layers": 1},
        mtp_tensors(),
        mtp_features,
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def read_params(case: Case) -> tuple[Any, Any]:
    """(config, params) of a case; d2t is a param, t2d is not."""
    config = case.draft.config_from_hf(case.json_config, TARGET)
    tensors = {name: values for name, values in case.tensors.items() if name != "t2d"}
    return config, params_of_tensors(case.draft, config, tensors)  # type: ignore[arg-type]


def as_model(case: Case) -> ModelDef:
    """The draft as a model that reads embedding t from a table by token and feature t from another
    by position; what it "unembeds" is the feature (of MTP: normed) itself."""
    draft = case.draft

    def forward(config: Any, params: Any, batch: Any, pool: Any, ops: Any) -> Any:
        embeddings = ops.embed(params["embed"], batch.tokens)
        features = jnp.take(params["features"], batch.positions, axis=0, mode="clip")
        hidden, pool = draft.forward(
            config, params["draft"], embeddings, features, batch, pool, ops
        )
        return hidden, {}, pool

    def unembed(config: Any, params: Any, hidden: Any, ops: Any) -> Any:
        if draft is MTP:
            return draft.logits(config, params["draft"], hidden, lambda normed: normed, ops)
        return hidden

    nothing: Any = None
    return ModelDef(draft.name, nothing, nothing, nothing, draft.kv_spec, forward, unembed)


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(embedding table [96, 32], features [LENGTH, 32], tokens)."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((TARGET.vocab_size, 32)).astype(np.float32)
    features = rng.standard_normal((LENGTH, 32)).astype(np.float32)
    return table, features, rng.integers(0, TARGET.vocab_size, LENGTH).tolist()


def paged(case: Case, backend: str = "reference") -> tuple[PagedModel, np.ndarray, list[int]]:
    """(the draft over a pool, what the formula gives [LENGTH, 32], tokens)."""
    table, features, tokens = inputs()
    config, own = read_params(case)
    params = {"embed": table, "features": features, "draft": own}
    want = case.oracle(case.json_config, case.tensors, table[tokens], features)
    return PagedModel(as_model(case), config, params, backend=backend), want, tokens


def test_features_are_the_formulas(case: Case) -> None:
    model, want, tokens = paged(case)
    np.testing.assert_allclose(model.whole(tokens), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_chunks_and_single_tokens_are_the_whole(case: Case, backend: str) -> None:
    model, want, tokens = paged(case, backend)
    sequence, rows = PagedSequence(range(1, 9)), []
    rows.append(model.step(prefill=[(sequence, tokens[:CHUNK])])[0])
    rows.append(model.step(prefill=[(sequence, tokens[CHUNK : 2 * CHUNK])])[0])
    for token in tokens[2 * CHUNK :]:
        rows += model.step(decode=[(sequence, token)])
    np.testing.assert_allclose(np.concatenate(rows), want, atol=2e-5, rtol=2e-5)


def test_logits_of_eagle_are_the_targets() -> None:
    config, params = read_params(CASES["eagle"])
    features = np.ones((3, 32), np.float32)
    ops = make_ops("reference", EAGLE.kv_spec(config))
    logits = EAGLE.logits(config, params, features, lambda hidden: hidden @ np.eye(32, 7), ops)
    np.testing.assert_array_equal(logits, np.ones((3, 7)))
    assert EAGLE.tap_names(config) == ()
    assert EAGLE.fuse(config, params, features, ops) is features
    np.testing.assert_array_equal(EAGLE.target_ids(config, params, jnp.arange(4)), np.arange(4))


def test_logits_ids_and_features_of_eagle3() -> None:
    case = CASES["eagle3"]
    config, params = read_params(case)
    ops = make_ops("reference", EAGLE3.kv_spec(config))
    _, features, _ = inputs(1)
    logits = EAGLE3.logits(config, params, features, _never, ops)
    assert logits.dtype == jnp.float32
    assert logits.shape == (LENGTH, DRAFT_VOCABULARY)
    want = oracle.eagle3_logits(case.json_config, case.tensors, features)
    np.testing.assert_allclose(logits, want, atol=1e-5, rtol=1e-5)
    ids = EAGLE3.target_ids(config, params, jnp.arange(DRAFT_VOCABULARY))
    np.testing.assert_array_equal(ids, draft_words())
    captured = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    fused = EAGLE3.fuse(config, params, captured, ops)
    np.testing.assert_allclose(fused, captured @ case.tensors["fc.weight"].T, atol=1e-5, rtol=1e-5)


def _never(hidden: jax.Array) -> jax.Array:
    raise AssertionError(f"EAGLE-3 has an unembedding of its own, got {hidden.shape}")


def test_eagle3_names_the_taps_that_a_target_gives() -> None:
    """Three by default, as published; or what eagle_config lists."""
    target = TargetSizes(32, 30, 96)
    config = EAGLE3.config_from_hf(LAYER, target)
    assert EAGLE3.tap_names(config) == tuple(map(layer_input, (2, 15, 27)))
    assert config.draft_vocab_size == 96
    listed = LAYER | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29]}}
    config = EAGLE3.config_from_hf(listed, target)
    assert EAGLE3.tap_names(config) == (layer_input(1), layer_input(29))
    assert EAGLE3.param_specs(config)["fc"].shape == (32, 64)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_targets_give_every_layers_input(architecture: str) -> None:
    """The tap of the first layer is the embedding; norming what the last layer makes of its own
    gives the hidden states, so the taps are inputs and not outputs."""
    hf = LAYER | {"architectures": [architecture], "num_hidden_layers": 3}
    model = find_model(architecture)
    config = model.config_from_hf(hf)
    run = PagedModel(model, config, random_params(model, config))
    batch, _ = run._batch((), [(PagedSequence(range(1, 9)), [1, 2, 3])], 0, 0, 0)
    _, taps, _ = model.forward(config, run.params, batch, run.pool, run.ops)
    assert list(taps) == [layer_input(index) for index in range(3)]
    scale = 1.0 if architecture.startswith("Llama") else 32**0.5
    table = np.asarray(run.params["embed"])
    np.testing.assert_allclose(taps[layer_input(0)], table[[1, 2, 3]] * scale, rtol=1e-6)
    cut = model.config_from_hf(hf | {"num_hidden_layers": 2})
    shorter = {**run.params, "layers": run.params["layers"][:2]}
    hidden, _, _ = model.forward(cut, shorter, batch, run.pool, run.ops)
    ops = make_ops("reference", model.kv_spec(config))
    weight = run.params["final_norm"] + (0.0 if scale == 1.0 else 1.0)
    normed = ops.rms_norm(taps[layer_input(2)], weight, config.rms_norm_eps)
    np.testing.assert_allclose(normed, hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("draft", "change", "message"),
    [
        (EAGLE, {"hidden_size": 64, "head_dim": 16}, "hidden_size of the draft is 64, the target"),
        (EAGLE, {"vocab_size": 100}, "vocab_size of the draft is 100, the target's is 96"),
        (EAGLE, {"bias": "yes"}, "bias is yes; want true or false"),
        (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers is 2; EAGLE-3 has one"),
        (EAGLE3, {"draft_vocab_size": 97}, "draft_vocab_size is 97; want a whole number 1 to 96"),
        (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [6]}, "want layers 0 to 5 of the target"),
        (MTP, {}, "num_nextn_predict_layers is None"),
        (MTP, {"n_routed_experts": 8}, "n_routed_experts says that the layers have"),
    ],
)
def test_what_does_not_fit_is_refused(
    draft: FeatureDraft, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        draft.config_from_hf(LAYER | change, TARGET)


def test_sizes_of_a_target_without_them() -> None:
    with pytest.raises(ModelLoadError, match=r"config\.hidden_size is None; a draft wants"):
        target_sizes(object())
