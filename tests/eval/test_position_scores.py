"""Reducing logits on the device gives what float64 formulas give, in pieces of bounded size."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.eval.position_scores import (
    MAX_LOGITS_BYTES,
    Head,
    compare_piece,
    piece_rows,
    pieces,
    score_piece,
)
from jaxserve.models.registry import find_model

T, V, PADDED = 12, 50, 56
OPS = make_ops("reference", KVSpec((KVGroup("global", (0,), 1, 8),)))
# "hidden" is the logits themselves; columns from V on are a checkpoint's padding.
MODEL = replace(
    find_model("LlamaForCausalLM"), unembed=lambda config, params, hidden, ops: hidden * params
)
HEAD = Head(MODEL, None, OPS, V)
ONE = jnp.float32(1)


def logits(seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 4, (T, PADDED)).astype(np.float32)
    values[:, V:] = 99.0  # would win everywhere
    return values


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values[:, :V].astype(np.float64)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


def targets(start: int, rows: int) -> np.ndarray:
    return np.array([start, *np.arange(rows) * 3 % V], np.int32)


def test_scores_are_the_formulas():
    own = logits(0)
    got = score_piece(HEAD, ONE, jnp.asarray(own), targets(4, 8), 8)
    want = log_softmax(own)[4:]
    np.testing.assert_allclose(got.logprob, want[np.arange(8), np.arange(8) * 3], atol=2e-5)
    np.testing.assert_array_equal(got.best, want.argmax(1))
    ordered = np.sort(want, axis=1)
    np.testing.assert_allclose(got.margin, ordered[:, -1] - ordered[:, -2], atol=2e-5)


def test_the_lowest_id_wins_a_tie_and_its_margin_is_zero():
    own = logits(0)
    own[:, [7, 31]] = 30.0
    got = score_piece(HEAD, ONE, jnp.asarray(own), targets(0, T), T)
    assert set(np.asarray(got.best)) == {7}
    assert set(np.asarray(got.margin)) == {0.0}


def test_kl_is_the_formula_and_knows_its_direction():
    own, other = logits(1), logits(2)
    got, base, kl = compare_piece(
        HEAD, ONE, jnp.asarray(own), HEAD, ONE, jnp.asarray(other), targets(0, T), T
    )
    log_own, log_other = log_softmax(own), log_softmax(other)
    want = (np.exp(log_other) * (log_other - log_own)).sum(1)
    np.testing.assert_allclose(kl, want, rtol=1e-4)
    np.testing.assert_array_equal(got.best, log_own.argmax(1))
    np.testing.assert_array_equal(base.best, log_other.argmax(1))


def test_kl_of_equal_distributions_is_zero_and_impossible_words_cost_nothing():
    own = logits(3)
    own[:, 5] = -np.inf
    one = jnp.asarray(own)
    _, _, kl = compare_piece(HEAD, ONE, one, HEAD, ONE, one, targets(0, T), T)
    np.testing.assert_array_equal(kl, np.zeros(T))


@given(words=st.integers(1, 1 << 20), chunk=st.integers(1, 4096))
def test_a_piece_of_logits_is_bounded(words, chunk):
    rows = piece_rows(chunk, words)
    assert 1 <= rows <= chunk
    assert rows * words * 4 <= max(MAX_LOGITS_BYTES, words * 4)
    if rows < chunk:
        assert 2 * rows * words * 4 > MAX_LOGITS_BYTES, "and no smaller than it must be"


def test_pieces_of_gemma_hold_64_rows_alone_and_32_beside_another():
    assert piece_rows(512, 262_144) == 64
    assert piece_rows(512, 2 * 262_144) == 32


@given(total=st.integers(1, 60), first=st.integers(0, 59), count=st.integers(0, 60), data=st.data())
def test_pieces_cover_every_wanted_row_once(total, first, count, data):
    first = min(first, total)
    count = min(count, total - first)
    rows = data.draw(st.integers(1, total))
    covered = []
    for start, wanted in pieces(first, count, rows, total):
        assert 0 <= start <= total - rows
        assert 0 <= wanted.start < wanted.stop <= rows
        covered += range(start + wanted.start, start + wanted.stop)
    assert covered == list(range(first, first + count))


def test_fewer_rows_give_the_same_numbers():
    own = logits(4)
    whole = score_piece(HEAD, ONE, jnp.asarray(own), targets(0, T), T)
    part = score_piece(HEAD, ONE, jnp.asarray(own), targets(0, T)[:5], 4)
    assert np.asarray(part.logprob) == pytest.approx(np.asarray(whole.logprob)[:4], abs=1e-6)
