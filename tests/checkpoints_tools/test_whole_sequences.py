"""Training sees what serving computes: whole windows and chains, against a paged pool."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.chain_loss import ChainTask, Given, guesses
from checkpoints_tools.target_states import StatesBatch
from checkpoints_tools.training_text import pack
from checkpoints_tools.whole_sequences import no_keys, sequence_batch, sequence_ops
from jaxserve.models.base import ModelDef
from jaxserve.models.drafts.base import FeatureDraft
from jaxserve.models.drafts.eagle import EAGLE
from jaxserve.models.drafts.eagle3 import EAGLE3
from jaxserve.models.registry import find_model
from tests.support.draft_checkpoints import (
    DRAFT_VOCABULARY,
    LAYER,
    TARGET,
    eagle3_tensors,
    eagle_tensors,
)
from tests.support.paged_model import (
    PagedModel,
    PagedSequence,
    params_of_tensors,
    random_params,
)

LENGTH, STEPS = 24, 3
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 5},
    "Gemma3ForCausalLM": {"sliding_window": 5, "sliding_window_pattern": 2},
}
DRAFTS = {
    "eagle": (EAGLE, LAYER, eagle_tensors()),
    "eagle3": (EAGLE3, LAYER | {"draft_vocab_size": DRAFT_VOCABULARY}, eagle3_tensors()),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_window_of_documents_is_each_document_alone(architecture: str) -> None:
    model = find_model(architecture)
    hf = LAYER | {"architectures": [architecture], "num_hidden_layers": 2}
    config = model.config_from_hf(hf | FAMILIES[architecture])
    params = random_params(model, config)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 96, length).tolist() for length in (9, 11, 20)]
    windows = pack(documents, LENGTH)
    ops = sequence_ops(model.kv_spec(config), LENGTH)
    batch = sequence_batch(windows.tokens, windows.rows, windows.positions)
    hidden, _, _ = model.forward(config, params, batch, no_keys(), ops)
    logits = np.asarray(model.unembed(config, params, hidden, ops)).reshape(-1, LENGTH, 96)
    for document, (window, start) in zip(documents, [(0, 0), (0, 9), (1, 0)], strict=True):
        want = PagedModel(model, config, params).whole(document)
        got = logits[window, start : start + len(document)]
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def as_model(draft: FeatureDraft) -> ModelDef:
    """The draft as a model whose step reads one feature, params["feature"], for its last token,
    and known ones by position for the others; logits are the features."""

    def forward(config: Any, params: Any, batch: Any, pool: Any, ops: Any) -> Any:
        embeddings = ops.embed(params["embed"], batch.tokens)
        features = jnp.take(params["features"], batch.positions, axis=0, mode="clip")
        hidden, pool = draft.forward(
            config, params["draft"], embeddings, features, batch, pool, ops
        )
        return hidden, {}, pool

    def unembed(config: Any, params: Any, hidden: Any, ops: Any) -> Any:
        return hidden

    nothing: Any = None
    return ModelDef(draft.name, nothing, nothing, nothing, draft.kv_spec, forward, unembed)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_chain_in_training_is_a_chain_in_service(name: str) -> None:
    """From every start: the known pairs go through the pool, then the draft's own features, token
    by token. The logits are those that training holds to the target."""
    draft, hf, tensors = DRAFTS[name]
    config = draft.config_from_hf(hf, TARGET)
    own = params_of_tensors(draft, config, {k: v for k, v in tensors.items() if k != "t2d"})  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 96, 10).tolist()
    captured = rng.standard_normal((10, 96 if draft is EAGLE3 else 32)).astype(np.float32)
    table, unembedding = rng.standard_normal((2, 96, 32)).astype(np.float32)
    windows = pack([rng.integers(0, 96, 5).tolist(), tokens], LENGTH)  # another one in front
    spread = np.zeros((1, LENGTH, captured.shape[1]), np.float32)
    spread[0, 5:15] = captured
    batch = StatesBatch(windows.tokens, windows.rows, windows.positions, spread, spread)
    target = find_model("LlamaForCausalLM")
    target_config = target.config_from_hf(LAYER)
    ops = sequence_ops(draft.kv_spec(config), LENGTH)
    task = ChainTask(draft, config, target, target_config, ops, STEPS)
    learnt = {key: value for key, value in own.items() if key != "d2t"}
    fixed = {key: value for key, value in own.items() if key == "d2t"}
    given = Given(table, {"unembed": unembedding}, fixed)
    found = [
        (np.asarray(logits)[0, 5:15], np.asarray(valid)[0, 5:15])
        for logits, valid in guesses(task, learnt, given, batch)
    ]
    fused = np.asarray(draft.fuse(config, own, jnp.asarray(captured), ops))
    for start in (0, 1, 6):
        params = {"embed": table, "features": fused, "draft": own}
        model = PagedModel(as_model(draft), config, params)
        sequence = PagedSequence(range(1, 9))
        feature = model.step(prefill=[(sequence, tokens[1 : start + 2])])[0][-1]
        for step in range(STEPS):
            logits = draft.logits(config, own, feature[None], lambda x: x @ unembedding.T, ops)
            at = start + step
            assert found[step][1][at]
            np.testing.assert_allclose(found[step][0][at], logits[0], atol=3e-5, rtol=3e-5)
            model.params = params | {"features": np.repeat(feature[None], LENGTH, axis=0)}
            if at + 2 < len(tokens):
                feature = model.step(decode=[(sequence, tokens[at + 2])])[0][-1]
    assert not found[0][1][-1], "what follows the last token is not known"
    assert not found[1][1][0], "a chain of two has no place at the first pair"
    assert found[1][1][1]
