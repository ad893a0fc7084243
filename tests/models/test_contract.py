"""The contract test: every family, every example, and any file given with --model-file.

    python -m pytest tests/models/test_contract.py --model-file my_model.py

A model file takes part if it has a TEST_CONFIG, a small config.json as a dict.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.core.backends import make_ops
from jaxserve.models.base import ModelDef
from jaxserve.models.contract import check_contract
from jaxserve.models.registry import architectures, find_model
from jaxserve.models.user_file import import_model_file, load_model_file
from tests.support.paged_model import PagedModel, PagedSequence, random_params

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
LENGTH, CHUNK, BESIDE = 24, 8, 3  # three chunks; or chunks of 3 beside 8 decode steps
TINY = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": TINY | {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": TINY | {"sliding_window": 7, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": TINY
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3ForCausalLM": TINY,
    "Gemma3ForCausalLM": TINY
    | {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    files = [*EXAMPLES, *map(Path, metafunc.config.getoption("--model-file"))]
    metafunc.parametrize("subject", [*FAMILIES, *files], ids=lambda item: Path(item).stem)


@pytest.fixture
def run(subject: str | Path) -> PagedModel:
    model, config_json = _load(subject)
    config = model.config_from_hf(config_json)
    return PagedModel(model, config, random_params(model, config))


def _load(subject: str | Path) -> tuple[ModelDef, Mapping[str, Any]]:
    if isinstance(subject, str):
        return find_model(subject), {**FAMILIES[subject], "architectures": [subject]}
    config = getattr(import_model_file(subject), "TEST_CONFIG", None)
    assert config is not None, f"{subject} has no TEST_CONFIG, a small config.json as a dict"
    return load_model_file(subject), config


def _tokens(run: PagedModel, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, run.config.vocab_size, LENGTH).tolist()


def test_every_family_is_covered() -> None:
    assert set(FAMILIES) == set(architectures())


def test_shapes_keep_the_contract(run: PagedModel) -> None:
    for dtype in ("float32", "bfloat16"):
        check_contract(run.model, run.config, run.ops, dtype)


def test_chunks_and_decode_equal_the_whole_prompt(run: PagedModel) -> None:
    """Two requests share steps: one decodes token by token beside the chunks of the other."""
    first, second = _tokens(run, 1), _tokens(run, 2)
    want_first, want_second = run.whole(first), run.whole(second)
    one, two = PagedSequence(range(1, 9)), PagedSequence(range(20, 28))
    rows_one: list[np.ndarray] = []
    rows_two: list[np.ndarray] = []
    while len(rows_one) < LENGTH - LENGTH // BESIDE:
        rows_one.extend(run.step(prefill=[(one, first[len(rows_one) :][:CHUNK])])[0])
    while len(rows_one) < LENGTH:
        chunk = second[len(rows_two) :][:BESIDE]
        decoded, chunked = run.step(decode=[(one, first[len(rows_one)])], prefill=[(two, chunk)])
        rows_one.extend(decoded)
        rows_two.extend(chunked)
    np.testing.assert_allclose(rows_one, want_first, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(rows_two, want_second, atol=1e-5, rtol=1e-5)


def test_one_jitted_step_with_a_donated_pool_gives_the_same(run: PagedModel) -> None:
    tokens = _tokens(run, 3)
    want = run.whole(tokens)
    run.jitted = True
    before = jax.tree.leaves(run.pool)
    np.testing.assert_allclose(run.whole(tokens), want, atol=1e-5, rtol=1e-5)
    assert all(pages.is_deleted() for pages in before)


def test_order_of_pages_changes_no_bit(run: PagedModel) -> None:
    tokens = _tokens(run, 4)
    pages = np.random.default_rng(0).permutation(np.arange(1, 40))[: run.pages_per_row]
    np.testing.assert_array_equal(run.whole(tokens, pages.tolist()), run.whole(tokens))


def test_padding_changes_no_bit(run: PagedModel) -> None:
    """Same shapes, other contents of the padding: a free decode row, a free row, free tokens."""
    tokens, results = _tokens(run, 5), []
    for junk in (0, 11):
        one, two = PagedSequence(range(1, 9)), PagedSequence(range(20, 28))
        run.step(prefill=[(one, tokens[:CHUNK])])
        results.append(
            run.step(
                decode=[(one, tokens[CHUNK]), None], prefill=[(two, tokens[:BESIDE])],
                pad_rows=1, pad_tokens=3, junk=junk,
            )
        )  # fmt: skip
    for clean, padded in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, padded)
    whole = run.whole(tokens)
    np.testing.assert_allclose(results[0][0][0], whole[CHUNK], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(results[0][1], whole[:BESIDE], atol=1e-5, rtol=1e-5)


def test_ops_of_equal_specs_share_programs(run: PagedModel) -> None:
    """Models are static arguments: equal configs and ops must hash alike, or steps recompile."""
    again = make_ops("reference", run.model.kv_spec(run.config))
    assert again == run.ops
    assert hash(again) == hash(run.ops)
    assert hash(run.config) == hash(run.config)
