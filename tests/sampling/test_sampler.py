"""The sampler as the engine calls it: mixes of requests, broken rows, padding, counts."""

import jax
import numpy as np
import pytest

from jaxserve.sampling import make_state, sample, set_slot
from tests.support.sampling_runs import SLOTS, TOY, batch_of, run, wide

ROWS, WIDTH, VOCAB = 4, 16, 2400
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH, VOCAB)).astype(np.float32) * 3


def test_greedy_rows_take_the_lowest_of_the_largest():
    logits = np.stack([wide(0, 0, 1, 0, 0, 1), wide(-5, -6, -7), wide(*[-np.inf] * 7, -1e9)])
    output, _ = run(logits, {}, {}, {})
    assert output.tokens[:, 0].tolist() == [2, 0, 7]
    assert output.ok.all()
    assert output.num_accepted.tolist() == [0, 0, 0]


def test_b32_greedy_rows_do_not_change_beside_sampled_ones(logits):
    alone, _ = run(logits, {}, {}, {}, {})
    mixed, _ = run(logits, {}, SAMPLED, {"top_k": 1, "top_p": 0.1}, {"temperature": 1.0})
    np.testing.assert_array_equal(mixed.tokens[[0, 2]], alone.tokens[[0, 2]])
    np.testing.assert_array_equal(alone.tokens, logits.argmax(axis=-1))


KINDS = [
    SAMPLED,
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 400},
    {"temperature": 1.0, "top_k": 400, "top_p": 0.8, "bias": {7: 3.0}},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_seeded_row_draws_the_same_alone_in_any_row_and_beside_anyone(logits, settings):
    seeded = {**settings, "seed": 2**63 + 12345, "choice": 1, "position": 40}
    others = [{}, SAMPLED, {"temperature": 1.0, "top_k": 300, "top_p": 0.5, "seed": 9}]
    alone, _ = run(logits[:1], seeded, bucket=1)
    for row in range(ROWS):
        rows = [*others[:row], seeded, *others[row:]]
        moved = np.roll(logits, row, axis=0)
        beside, _ = run(moved, *rows)
        np.testing.assert_array_equal(beside.tokens[row], alone.tokens[0])


def test_each_position_is_drawn_as_if_it_came_alone(logits):
    whole, _ = run(logits, *[{**SAMPLED, "seed": 5, "position": 100}] * ROWS)
    for step in (0, 3, WIDTH - 1):
        part = np.repeat(logits[:, step : step + 1], WIDTH, axis=1)
        single, _ = run(part, *[{**SAMPLED, "seed": 5, "position": 100 + step}] * ROWS)
        np.testing.assert_array_equal(single.tokens[:, 0], whole.tokens[:, step])


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-39, 1e-7, 1e-5, 1e-3, 1e-2])
def test_b18_small_temperatures_tend_to_the_argmax(temperature):
    rng = np.random.default_rng(3)
    logits = rng.permuted(np.tile(np.arange(float(VOCAB)), (ROWS, WIDTH, 1)), axis=2)
    logits[1] -= 1e4
    logits[2, :, rng.random(VOCAB) < 0.5] = -np.inf
    warm = {"temperature": 1.0, "seed": 1, "num_logprobs": 3}
    cold = {"temperature": temperature, "num_logprobs": 3}
    control, _ = run(logits, {"num_logprobs": 3}, {"num_logprobs": 3}, {"num_logprobs": 3}, warm)
    output, _ = run(logits, cold, cold, cold, warm)
    np.testing.assert_array_equal(output.tokens[:3], logits.argmax(axis=2)[:3])
    assert output.ok.all()
    assert np.isfinite(output.logprobs.token_logprob).all()
    for mine, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(control), strict=True):
        np.testing.assert_array_equal(mine[3], theirs[3])


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.9}], ids=str)
def test_b18_small_temperatures_with_filters_and_equal_tops(filters):
    logits = np.full((ROWS, WIDTH, VOCAB), -5.0, np.float32)
    logits[:, :, [7, 400]] = 3.0
    rows = [{"temperature": 1e-7, "seed": seed, **filters} for seed in range(ROWS)]
    output, _ = run(logits, *rows)
    assert set(output.tokens.ravel().tolist()) == {7, 400}


@pytest.mark.parametrize("place", [0, 1, 17, 255, 1000, VOCAB - 1])
def test_b34_a_row_with_nan_fails_alone(logits, place):
    kinds = [{}, {**SAMPLED, "slot": 2}, {"temperature": 1.0, "slot": 3}, {"top_k": 300}]
    kinds = [{**kind, "num_logprobs": 2} for kind in kinds]
    clean, clean_state = run(logits, *kinds)
    for row in range(ROWS):
        broken = logits.copy()
        broken[row, :, place] = np.nan
        output, state = run(broken, *kinds)
        assert output.ok.tolist() == [other != row for other in range(ROWS)]
        assert (output.tokens[row] == 0).all()
        others = [other for other in range(ROWS) if other != row]
        for mine, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(mine[others], theirs[others])
        counted = clean_state.output_counts.copy()
        if kinds[row].get("slot"):
            counted[kinds[row]["slot"]] = 0
        np.testing.assert_array_equal(state.output_counts, counted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_b34_a_bad_logit_is_found_where_a_mask_hides_it(logits, bad):
    broken = logits.copy()
    broken[0, :, 7] = bad
    hide = {"suppress": [7], "suppress_until": 10_000}
    output, _ = run(broken, hide, hide, {**hide, **SAMPLED}, {})
    assert output.ok.tolist() == [False, True, True, True]


@pytest.mark.parametrize("row_of", [np.inf, -np.inf])
def test_b34_rows_without_a_largest_logit_fail_alone(logits, row_of):
    broken = logits.copy()
    broken[1] = row_of
    output, _ = run(broken, {}, SAMPLED, SAMPLED, {})
    assert output.ok.tolist() == [True, False, True, True]
    assert (output.tokens[1] == 0).all()


def test_inactive_rows_hold_zero_and_are_never_at_fault(logits):
    broken = logits.copy()
    broken[1] = np.nan
    idle = {"active": False, **SAMPLED, "slot": 1, "num_logprobs": 5}
    output, state = run(broken, {}, idle, {**SAMPLED, "seed": 3}, idle)
    control, _ = run(logits, {}, SAMPLED, {**SAMPLED, "seed": 3}, {})
    assert output.ok.all()
    assert (output.tokens[[1, 3]] == 0).all()
    np.testing.assert_array_equal(output.tokens[[0, 2]], control.tokens[[0, 2]])
    assert state.output_counts.sum() == 0


PADDED = 1000  # of 1064 rows of the output matrix


def test_b38_ids_beyond_the_vocabulary_are_never_drawn():
    logits = np.random.default_rng(4).normal(size=PADDED + 64).astype(np.float32)
    logits[PADDED:] = 50.0
    logits = np.broadcast_to(logits, (ROWS, 500, len(logits)))
    filters = [{}, {"top_k": 100}, {"top_k": 900}, {"top_p": 0.99}]
    seen = [set() for _ in filters]
    for start in range(0, 10_000, 500):
        rows = [{"temperature": 5.0, "position": start, **one} for one in filters]
        tokens = run(logits, *rows, vocab_size=PADDED)[0].tokens
        assert tokens.min() >= 0
        assert tokens.max() < PADDED
        for row, one in zip(tokens, seen, strict=True):
            one |= set(row.tolist())
    assert [len(one) > 99 for one in seen] == [True] * 4


@pytest.mark.parametrize("high", [50.0, np.inf, np.nan])
def test_b38_padding_is_in_no_logprob_and_breaks_no_row(high):
    logits = np.random.default_rng(4).normal(size=(ROWS, PADDED + 64)).astype(np.float32)
    hot = {"temperature": 5.0, "num_logprobs": 20}
    asking = [{"num_logprobs": 20}, hot, {}, {"num_logprobs": 0}]
    control = run(logits, *asking, vocab_size=PADDED)
    logits[:, PADDED:] = high
    output = run(logits, *asking, vocab_size=PADDED)
    for mine, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(control), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert output[0].ok.all()
    assert output[0].logprobs.top_ids.max() < PADDED


def test_held_back_ids_are_not_drawn_until_their_time():
    logits = wide(0, 0, 0, 9, 0, 8, 7)
    held = {"suppress": [3, 5], "suppress_until": 10}
    for position, expected in ((0, 6), (9, 6), (10, 3), (11, 3)):
        output, _ = run(logits, {**held, "position": position}, {"position": position})
        assert output.tokens[:, 0].tolist() == [expected, 3]


def test_holding_back_everything_fails_the_row_alone():
    output, _ = run(wide(0.0), {"suppress": list(range(TOY)), "suppress_until": 10}, {})
    assert output.ok.tolist() == [False, True]


def test_bias_moves_its_row_alone_and_comes_before_temperature_and_filters():
    logits = np.broadcast_to(wide(*[0.0] * 8), (4, 512, TOY))
    warm = {"temperature": 1.0, "seed": 6}
    rows = [
        {"bias": {0: -100.0, 4: 0.5}},
        {**warm, "bias": {7: -100.0, 1: -100.0}},
        {**warm, "temperature": 0.1, "bias": {2: 2.0}},  # 20 ahead after the division
        {**warm, "top_k": 1, "bias": {5: 1.0, 6: 1.0}},
    ]
    output, _ = run(logits, *rows)
    drawn = [set(row.tolist()) for row in output.tokens]
    assert drawn == [{4}, {0, 2, 3, 4, 5, 6}, {2}, {5, 6}]


def test_first_tokens_are_counted_once_in_their_slot(logits):
    state = make_state(SLOTS, VOCAB)
    rows = [{"slot": 5}, {"slot": 0}, {"slot": 2}, {"slot": 3, "active": False}]
    for _ in range(3):
        output, state = run(logits, *rows, state=state)
    expected = np.zeros((SLOTS, VOCAB), np.int32)
    expected[5, output.tokens[0, 0]] = 3
    expected[2, output.tokens[2, 0]] = 3
    np.testing.assert_array_equal(state.output_counts, expected)
    assert not state.in_prompt.any()


def test_set_slot_replaces_one_slot():
    state = make_state(3, 5)
    full = np.ones(5, np.int32)
    state = set_slot(state, 1, full.astype(bool), 2 * full)
    state = set_slot(state, 2, np.array([1, 0, 0, 0, 1], bool), full)
    state = jax.jit(set_slot)(state, 1, np.array([0, 1, 0, 0, 0], bool), np.arange(5))
    np.testing.assert_array_equal(state.in_prompt, [[0] * 5, [0, 1, 0, 0, 0], [1, 0, 0, 0, 1]])
    np.testing.assert_array_equal(state.output_counts, [[0] * 5, [0, 1, 2, 3, 4], [1] * 5])


def test_a_state_narrower_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="counts 5 tokens, the vocabulary has 8"):
        run(np.zeros((1, 8)), {}, state=make_state(2, 5))


def test_the_state_is_updated_in_place_and_every_mix_is_one_program():
    rows, vocab = 2, 4096
    state = make_state(65, vocab)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    step = jax.jit(sample, static_argnames="vocab_size", donate_argnums=2)
    logits = np.zeros((rows, 1, vocab), np.float32)
    lowered = step.lower(logits, batch_of({}, {}), state, vocab_size=vocab)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 8 * logits.nbytes < state.output_counts.nbytes / 4
    for mix in (
        [{}, {}],
        [SAMPLED, {"slot": 1, "presence_penalty": 1.0}],
        [{"num_logprobs": 3}] * 2,
    ):
        _, state = step(logits, batch_of(*mix), state, vocab_size=vocab)
    assert step._cache_size() == 1
