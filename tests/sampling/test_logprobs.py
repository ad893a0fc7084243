import numpy as np
import pytest

from jaxserve.sampling_params import MAX_LOGPROBS
from tests.support.sampling_runs import run, wide

ROWS, WIDTH, VOCAB = 4, 16, 2400


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(8).normal(size=(ROWS, WIDTH, VOCAB)).astype(np.float32) * 3


def test_logprobs_are_of_the_raw_distribution_whatever_shapes_the_draw(logits):
    rows = [
        {"num_logprobs": 20},
        {"num_logprobs": 5, "temperature": 3.0, "top_k": 40, "seed": 1},
        {"num_logprobs": 0, "bias": {11: 100.0}},
        {"num_logprobs": 1, "temperature": 1.0, "suppress": [3], "suppress_until": 9},
    ]
    output, _ = run(logits, *rows)
    expected = log_softmax(logits[:, 0])
    tokens = output.tokens[:, 0]
    assert tokens[2] == 11
    chosen = expected[np.arange(ROWS), tokens]
    np.testing.assert_allclose(output.logprobs.token_logprob[:, 0], chosen, atol=1e-5)
    ranks = (expected > chosen[:, None]).sum(axis=1) + 1
    np.testing.assert_array_equal(output.logprobs.token_rank[:, 0], ranks)
    assert output.logprobs.token_rank[0, 0] == 1
    best = np.argsort(-expected, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(output.logprobs.top_ids[:, 0], best)
    np.testing.assert_allclose(
        output.logprobs.top_logprobs[:, 0], np.take_along_axis(expected, best, 1), atol=1e-5
    )


def test_nobody_asked_nothing_computed_and_nothing_else_changes(logits):
    rows = [{"temperature": 1.0, "seed": seed} for seed in range(ROWS)]
    without, _ = run(logits, *rows)
    with_them, _ = run(logits, *[{**row, "num_logprobs": 3} for row in rows])
    np.testing.assert_array_equal(without.tokens, with_them.tokens)
    assert not without.logprobs.top_logprobs.any()
    assert with_them.logprobs.top_logprobs.all()


def test_an_inactive_row_does_not_make_the_step_compute_logprobs(logits):
    idle = {"active": False, "num_logprobs": 5}
    output, _ = run(logits, {}, idle, idle, {})
    assert not output.logprobs.top_logprobs.any()


def test_b34_impossible_tokens_have_minus_infinity_and_no_id():
    logits = wide(rest=-np.inf)
    logits[[5, 30]] = [1.0, 2.0]
    output, _ = run(logits, {"num_logprobs": 20, "temperature": 1.0, "top_k": 1})
    assert output.logprobs.top_ids[0, 0].tolist() == [30, 5] + [-1] * 18
    assert np.isneginf(output.logprobs.top_logprobs[0, 0, 2:]).all()
    expected = log_softmax(np.array([2.0, 1.0]))
    np.testing.assert_allclose(output.logprobs.top_logprobs[0, 0, :2], expected, atol=1e-6)


def test_b34_a_forced_unlikely_token_has_a_finite_logprob_and_its_rank():
    logits = wide(rest=0.0)
    logits[9] = 300.0
    output, _ = run(logits, {"num_logprobs": 2, "bias": {9: -100.0, 3: 100.0, 4: -100.0}})
    assert output.tokens[0, 0] == 9  # 200 against 100
    logits[9] = 150.0
    output, _ = run(logits, {"num_logprobs": 2, "bias": {9: -100.0, 3: 100.0}})
    assert output.tokens[0, 0] == 3
    assert output.logprobs.token_logprob[0, 0] == pytest.approx(-150.0)
    assert output.logprobs.token_rank[0, 0] == 2


def test_a_vocabulary_smaller_than_the_list_is_filled_up():
    output, _ = run(np.zeros((1, 8)), {"num_logprobs": 20})
    assert sorted(output.logprobs.top_ids[0, 0, :8].tolist()) == list(range(8))
    assert output.logprobs.top_ids[0, 0, 8:].tolist() == [-1] * 12
    np.testing.assert_allclose(output.logprobs.top_logprobs[0, 0, :8], np.log(1 / 8), atol=1e-6)
    assert output.logprobs.token_rank[0, 0] == 1  # nobody is strictly more likely
