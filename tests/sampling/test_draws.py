"""Which tokens can be drawn, and that the right one is: by float64, sorting and transformers."""

import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import draws
from jaxserve.sampling.draws import CANDIDATES, Filters, draw
from jaxserve.sampling.random import draw_keys
from pallas_kernels.row_sum.reference import row_sum_reference
from tests.support import sampling_oracle

VOCAB = 300
ROWS = 8
GOLDEN = json.loads((Path(__file__).parent / "filters_by_transformers.json").read_text())


def filters_of(rows):
    def column(name, neutral, dtype):
        return jnp.array([row.get(name, neutral) for row in rows], dtype)

    return Filters(
        column("temperature", 1.0, jnp.float32),
        column("top_k", 0, jnp.int32),
        column("top_p", 1.0, jnp.float32),
        column("min_p", 0.0, jnp.float32),
    )


def favour(keys, token_ids, purpose):
    """Noise that puts one token of each row, named by its key, ahead of all others."""
    return jnp.where(token_ids.astype(jnp.uint32) == keys[:, :1], 1e30, 0.0).astype(jnp.float32)


@pytest.fixture(scope="module")
def kept():
    """logits [VOCAB], settings -> the set of tokens that win when they are ahead: the kept ones."""
    ids = jnp.arange(VOCAB)
    keys = jnp.stack([ids, ids], axis=1).astype(jnp.uint32)
    every = jnp.ones(VOCAB, bool)

    def winners(logits, filters):
        return draw(logits, jnp.max(logits, axis=1), filters, keys, every, row_sum_reference)

    with mock.patch.object(draws, "gumbel", favour):
        shape = jnp.zeros((VOCAB, VOCAB), jnp.float32)
        compiled = jax.jit(winners).lower(shape, filters_of([{}] * VOCAB)).compile()

    def kept_tokens(logits, **row):
        tiled = jnp.tile(jnp.asarray(logits, jnp.float32), (VOCAB, 1))
        tokens = np.asarray(compiled(tiled, filters_of([row] * VOCAB)))
        won = set(np.flatnonzero(tokens == np.arange(VOCAB)).tolist())
        assert set(tokens.tolist()) == won, "a token outside the kept set was drawn"
        return won

    return kept_tokens


def toy(*head):
    """Logits that start with `head`; the rest far below, but possible."""
    return np.concatenate([head, np.full(VOCAB - len(head), -20.0)]).astype(np.float32)


EVERYTHING = set(range(VOCAB))
EDGES = [
    ({"top_k": 0}, EVERYTHING),
    ({"top_k": -1}, EVERYTHING),
    ({"top_k": 1}, {1}),
    ({"top_k": 2}, {0, 1}),
    ({"top_k": 3}, {0, 1, 2, 3}),  # a tie at the threshold
    ({"top_k": 4}, {0, 1, 2, 3}),
    ({"top_k": 6}, EVERYTHING),  # the 6th is one of many equals
    ({"top_k": VOCAB}, EVERYTHING),
    ({"top_k": VOCAB + 5}, EVERYTHING),
    ({"top_p": 0.0}, {1}),
    ({"top_p": 1e-9}, {1}),
    ({"top_p": 0.5}, {1}),
    ({"top_p": 0.7}, {0, 1}),
    ({"top_p": 0.9}, {0, 1, 2, 3}),
    ({"top_p": 0.999999}, {0, 1, 2, 3, 4}),
    ({"top_p": 1.0}, EVERYTHING),
    ({"min_p": 0.0}, EVERYTHING),
    ({"min_p": 0.1}, {0, 1, 2, 3}),
    ({"min_p": 1.0}, {1}),
    ({"min_p": 0.1, "temperature": 0.5}, {0, 1}),
    ({"top_k": 4, "top_p": 0.95}, {0, 1, 2, 3}),
    ({"top_k": 2, "top_p": 0.72}, {1}),  # 0.731 of what top_k leaves
    ({"top_k": 2, "top_p": 0.74}, {0, 1}),
    ({"min_p": 0.1, "top_p": 0.9}, {0, 1, 2, 3}),
    ({"top_k": 1, "top_p": 0.0, "min_p": 1.0}, {1}),
]


@pytest.mark.parametrize(("row", "expected"), EDGES, ids=[str(edge[0]) for edge in EDGES])
def test_b32_edges_of_top_k_top_p_and_min_p(kept, row, expected):
    logits = toy(3.0, 4.0, 2.0, 2.0, 0.0)  # shares .23 .62 .084 .084 .011
    assert kept(logits, **row) == expected
    oracle = sampling_oracle.kept(logits, **row)
    assert set(np.flatnonzero(oracle).tolist()) == expected


def test_b32_equal_logits_stay_together(kept):
    flat = np.zeros(VOCAB, np.float32)
    for row in ({"top_k": 1}, {"top_k": 200}, {"top_p": 0.0}, {"top_p": 0.3}, {"min_p": 1.0}):
        assert kept(flat, **row) == EVERYTHING
    two = toy(5.0, 5.0, 1.0)
    for row in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 0.4}, {"min_p": 1.0}):
        assert kept(two, **row) == {0, 1}


@pytest.mark.parametrize("top_k", [1, 40, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 250])
@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_impossible_tokens_are_never_kept(kept, top_k, top_p):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[5, 60, 61, 299]] = [1.0, 0.5, 0.0, -0.5]
    expected = np.flatnonzero(sampling_oracle.kept(logits, top_k=top_k, top_p=top_p))
    assert kept(logits, top_k=top_k, top_p=top_p) == set(expected.tolist())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["settings"]))
def test_transformers_keeps_the_same_tokens(kept, case):
    drawn = np.random.default_rng(GOLDEN["seed"]).normal(size=GOLDEN["vocab"]).astype(np.float32)
    logits = drawn * np.float32(GOLDEN["spread"])
    assert kept(logits, **case["settings"]) == set(case["kept"])


@st.composite
def row_of_logits(draw_from):
    """Normal, coarse (many ties), almost flat or huge logits, some of them impossible."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    kind = draw_from(st.sampled_from(["normal", "ties", "flat", "huge"]))
    logits = rng.normal(size=VOCAB) * draw_from(st.sampled_from([0.5, 3.0]))
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    if kind == "flat":
        logits = logits * 1e-3
    if kind == "huge":
        logits = logits + draw_from(st.sampled_from([-1e4, 1e4]))
    if draw_from(st.booleans()):
        impossible = rng.random(VOCAB) < draw_from(st.sampled_from([0.3, 0.9]))
        impossible[rng.integers(VOCAB)] = False
        logits = np.where(impossible, -np.inf, logits)
    return logits.astype(np.float32)


ROW_SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.0, 2.0, 30.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 20, CANDIDATES, CANDIDATES + 1, 200, VOCAB - 1]),
        "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.1]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(row_of_logits(), ROW_SETTINGS)
def test_the_kept_set_is_that_of_a_sort(kept, logits, row):
    expected, margin = sampling_oracle.kept_with_margin(logits, **row)
    if margin > 1e-4:
        assert kept(logits, **row) == set(np.flatnonzero(expected).tolist())


@jax.jit
def all_paths(logits, filters, seeds, choices, positions):
    """Tokens by `draw`, by the narrow race and by the wide one; and where the narrow one holds."""
    peak = jnp.max(logits, axis=1)
    keys = draw_keys(seeds, choices, positions)
    every = jnp.ones(logits.shape[0], bool)
    limited = (filters.top_k > 0) & (filters.top_k < logits.shape[1])
    tokens = draw(logits, peak, filters, keys, every, row_sum_reference)
    few, narrow = draws._draw_narrow(logits, peak, filters, keys, limited, row_sum_reference)
    many = draws._draw_wide(logits, peak, filters, keys, every, limited, row_sum_reference)
    return tokens, few, many, narrow


def paths(logits, rows, seeds=None):
    seeds = np.arange(len(rows)) if seeds is None else np.asarray(seeds)
    words = np.stack([seeds & 0xFFFFFFFF, seeds >> 32], axis=1).astype(np.uint32)
    choices, positions = jnp.array(seeds % 3), jnp.array(seeds % 1000)
    return map(
        np.asarray, all_paths(jnp.asarray(logits), filters_of(rows), words, choices, positions)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(row_of_logits(), ROW_SETTINGS), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 2**63 - 1), min_size=ROWS, max_size=ROWS),
)
def test_narrow_race_wide_race_and_sorting_oracle_agree(pairs, seeds):
    rows = [row for _, row in pairs]
    logits = np.stack([one for one, _ in pairs])
    tokens, few, many, narrow = paths(logits, rows, seeds)
    for index, row in enumerate(rows):
        seed = seeds[index]
        expected, margin = sampling_oracle.token(
            logits[index], seed=seed, choice=seed % 3, position=seed % 1000, **row
        )
        if margin < 1e-4:
            continue
        assert tokens[index] == many[index] == expected
        if narrow[index]:
            assert few[index] == expected


def test_small_top_k_is_narrow_unless_ties_reach_outside():
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    logits[1] = 0.0
    logits[2, :200] = 7.0
    logits[3, 10:] = -np.inf
    rows = [{"top_k": 20}, {"top_k": 20}, {"top_k": 20}, {"top_k": 20}, {}, {"top_k": VOCAB},
            {"top_k": CANDIDATES - 1}, {"top_k": CANDIDATES + 1}]  # fmt: skip
    _, _, _, narrow = paths(logits, rows)
    assert narrow.tolist() == [True, False, False, True, False, False, True, False]


def test_a_flat_row_with_a_tiny_top_p_ends():
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCAB)).astype(np.float32) * 1e-3
    tokens, _, _, _ = paths(logits, [{"top_p": 0.004}] * ROWS)
    for row, token in zip(logits, tokens, strict=True):
        assert sampling_oracle.kept(row, top_p=0.004)[token]
