"""The explicit distribution is the one that draws follow."""

import jax
import numpy as np
import pytest

from jaxserve.sampling import draft
from jaxserve.sampling.draws import Filters
from jaxserve.sampling.probabilities import probabilities
from pallas_kernels.row_sum.reference import row_sum_reference
from tests.support.sampling_oracle import kept_with_margin, noise
from tests.support.sampling_runs import batch_of, run

ROWS, VOCAB = 4, 400

_compiled = jax.jit(
    lambda logits, filters, wanted: probabilities(logits, filters, wanted, row_sum_reference)
)
_draft = jax.jit(draft, static_argnames="vocab_size")

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_k": 200},
    {"top_k": VOCAB},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 1e-3, "top_p": 0.5},
    {"temperature": 50.0, "top_p": 0.97},
]


def probs_of(logits, *settings, wanted=True):
    column = {
        name: np.array([one.get(name, neutral) for one in settings], kind)
        for name, neutral, kind in (
            ("temperature", 1.0, np.float32),
            ("top_k", 0, np.int32),
            ("top_p", 1.0, np.float32),
            ("min_p", 0.0, np.float32),
        )
    }
    return np.asarray(_compiled(logits, Filters(**column), np.full(len(settings), wanted)))


def rows_of_logits(seed):
    """Peaked, flat (top_p goes past any number of candidates), coarse (ties), and with holes."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, VOCAB)) * np.array([[4.0], [0.1], [1.0], [2.0]])
    logits[2] = np.round(logits[2])
    logits[3, rng.random(VOCAB) < 0.5] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_probabilities_are_those_of_what_the_filters_keep(settings):
    compared = 0
    for seed in range(3):
        logits = rows_of_logits(seed)
        probs = probs_of(logits, *[settings] * ROWS)
        for row in range(ROWS):
            mask, margin = kept_with_margin(logits[row], **settings)
            if margin < 1e-4:  # float32 may decide otherwise
                continue
            scaled = (logits[row].astype(np.float64) - logits[row].max()) / settings.get(
                "temperature", 1.0
            )
            weights = np.where(mask, np.exp(scaled), 0)
            np.testing.assert_allclose(probs[row], weights / weights.sum(), rtol=3e-5, atol=1e-9)
            compared += 1
    assert compared >= 6


def test_nothing_is_drawn_that_has_no_probability_and_the_bar_is_the_same():
    """One top_p after another, so that many bars are met; draws and probabilities share them."""
    logits = rows_of_logits(5)
    for number in range(40):
        filters = {"temperature": 1.0, "top_p": 0.01 + number / 41}
        probs = probs_of(logits, *[filters] * ROWS)
        tokens = run(logits, *[{**filters, "seed": number}] * ROWS)[0].tokens[:, 0]
        assert (np.take_along_axis(probs, tokens[:, None], axis=1) > 0).all()
        np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-5)


def test_rows_do_not_change_beside_others():
    logits = rows_of_logits(6)
    alone = [probs_of(logits, *[one] * ROWS) for one in SETTINGS[:ROWS]]
    mixed = probs_of(logits, *SETTINGS[:ROWS])
    for row in range(ROWS):
        np.testing.assert_array_equal(mixed[row], alone[row][row])


def drafted(logits, coupled, *rows):
    batch = batch_of(*rows)
    return jax.tree.map(np.asarray, _draft(logits, batch, np.array(coupled), vocab_size=VOCAB))


def test_drafts_with_the_targets_noise_are_the_targets_draws_where_the_logits_agree():
    logits = rows_of_logits(7)
    rows = [
        {"temperature": 1.0, "seed": 3, "position": 9},
        {"temperature": 0.7, "seed": 4, "top_k": 20, "choice": 1},
        {"temperature": 1.3, "seed": 5, "top_p": 0.8},
        {},
    ]
    tokens, probs = drafted(logits, [True] * ROWS, *rows)
    np.testing.assert_array_equal(tokens, run(logits, *rows)[0].tokens[:, 0])
    np.testing.assert_array_equal(probs[:3], probs_of(logits, *rows)[:3])
    assert probs[3].tolist() == (np.arange(VOCAB) == logits[3].argmax()).tolist()
    apart, _ = drafted(logits, [False] * ROWS, *rows)
    assert apart[3] == tokens[3]
    assert (apart[:3] != tokens[:3]).any()
    scores = np.log(probs[0].astype(np.float64)) + noise(3, 0, 9, VOCAB)
    assert scores.argmax() == tokens[0]


def test_drafts_of_rows_without_numbers_are_harmless():
    logits = rows_of_logits(8)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    rows = [{"temperature": 1.0, "seed": 3}] * 2 + [{}, {"temperature": 1.0, "seed": 4}]
    tokens, probs = drafted(logits, [False] * ROWS, *rows)
    assert (tokens >= 0).all()
    assert (tokens < VOCAB).all()
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-5)
