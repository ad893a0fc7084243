"""Verified drafts give the tokens, logprobs and counts of drawing one by one."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.sampling import make_state, set_slot
from tests.support.sampling_runs import SLOTS, TOY, run
from tests.support.verify_runs import (
    logits_behind,
    one_by_one,
    padded_drafts,
    run_verify,
    table_model,
)

GREEDY = {"slot": 1, "repetition_penalty": 1.7, "frequency_penalty": 0.9, "num_logprobs": 2}
KINDS = [
    {},
    GREEDY,
    {"slot": 2, "presence_penalty": 5.0, "bias": {3: 4.0, 8: -6.0}, "num_logprobs": 0},
    {"suppress": [1, 2, 3, 5, 8, 13, 21, 34], "suppress_until": 13, "num_logprobs": 3},
    {"temperature": 1.0, "seed": 5, "num_logprobs": 1},
    {"temperature": 1.3, "seed": 6, "slot": 3, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 0.8, "seed": 7, "top_k": 4, "top_p": 0.9, "bias": {4: 2.0}, "choice": 2},
    {"temperature": 1.1, "seed": 8, "min_p": 0.1, "slot": 4, "repetition_penalty": 1.4},
]
KINDS = [{"position": 10 + row, **kind} for row, kind in enumerate(KINDS)]


def started(vocab=TOY):
    """A state in which the slots have seen something."""
    rng = np.random.default_rng(2)
    state = make_state(SLOTS, vocab)
    for slot in range(1, SLOTS):
        counts = (rng.random(vocab) < 0.2) * rng.integers(1, 3, vocab)
        state = set_slot(state, slot, rng.random(vocab) < 0.3, counts.astype(np.int32))
    return jax.tree.map(np.asarray, state)


def mixed_drafts(truth, most, seed):
    """For each row a number of drafts, of which some first ones are true."""
    rng = np.random.default_rng(seed)
    drafts = []
    for row, tokens in enumerate(truth):
        count = 0 if row == seed % len(truth) else rng.integers(1, most + 1)
        good = rng.integers(0, count + 1)
        if row % 3 == 0:
            good = count
        wrong = [(tokens[place] + rng.integers(1, TOY)) % TOY for place in range(good, count)]
        drafts.append([*tokens[:good], *wrong])
    return drafts


# Any number of drafts up to 8, in rows of 2 and of 9: widths between differ in nothing but the time
# it takes to compile them.
@pytest.mark.parametrize(("width", "most"), [(2, 1), *((9, most) for most in range(1, 9))], ids=str)
def test_b26_tokens_logprobs_and_counts_are_those_of_single_steps(width, most):
    """Rows of every kind side by side, each with a number of drafts of its own or none."""
    for seed in range(2):
        model = table_model(TOY, seed)
        state = started()
        truth, logprobs, _ = one_by_one(model, [most + 1] * len(KINDS), *KINDS, state=state)
        drafts = mixed_drafts(truth, most, seed)
        output, after = run_verify(
            padded_drafts(drafts, width), logits_behind(model, drafts, width), *KINDS, state=state
        )
        assert output.ok.all()
        agreed = [
            next((n for n, draft in enumerate(row) if draft != tokens[n]), len(row))
            for row, tokens in zip(drafts, truth, strict=True)
        ]
        assert output.num_accepted.tolist() == agreed
        for row, count in enumerate(agreed):
            assert output.tokens[row, : count + 1].tolist() == truth[row][: count + 1]
            assert (output.tokens[row, len(drafts[row]) + 1 :] == 0).all()
            if KINDS[row].get("num_logprobs", -1) >= 0:
                for place in range(count + 1):
                    mine = jax.tree.map(lambda leaf, at=(row, place): leaf[at], output.logprobs)
                    same_bits(mine, logprobs[row][place])
        counted = one_by_one(model, [count + 1 for count in agreed], *KINDS, state=state)[2]
        same_bits(after, counted)
        assert min(agreed) == 0 < max(agreed)


def test_behind_a_wrong_draft_stands_what_would_be_drawn_if_it_held():
    """With the counts of the drafts before, and the noise of the place."""
    width, state = 5, started()
    model = table_model(TOY)
    truth, _, _ = one_by_one(model, [1] * len(KINDS), *KINDS, state=state)
    rng = np.random.default_rng(8)
    drafts = [[(tokens[0] + 1) % TOY, *rng.integers(0, TOY, row % 4)]
              for row, tokens in enumerate(truth)]  # fmt: skip
    output, _ = run_verify(
        padded_drafts(drafts, width), logits_behind(model, drafts, width), *KINDS, state=state
    )
    assert (output.num_accepted == 0).all()
    for row, kind in enumerate(KINDS):
        for place in range(len(drafts[row]) + 1):
            held = having_said(state, kind.get("slot", 0), drafts[row][:place])
            there = kind | {"position": kind["position"] + place}
            alone, _ = run(model(row, tuple(drafts[row][:place]))[None], there, state=held)
            assert output.tokens[row, place] == alone.tokens[0, 0], (row, place)


def having_said(state, slot, tokens):
    """The state with a slot that has seen some more tokens."""
    counts = state.output_counts.copy()
    if slot:
        np.add.at(counts[slot], tokens, 1)
    return replace(state, output_counts=counts)


def same_bits(mine, theirs):
    for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(left, right)


def test_rows_without_drafts_are_what_sample_makes_of_them():
    """Beside a row that has one, with a distribution, so that nothing is skipped."""
    vocab, width = 2400, 2
    logits = np.random.default_rng(1).normal(size=(len(KINDS), width, vocab)).astype(np.float32) * 3
    state = started(vocab)
    single, counted = run(logits[:, 0], *KINDS, state=state, bucket=len(KINDS))
    drafts = np.full((len(KINDS), width - 1), -1)
    drafts[4] = 7
    probs = np.full((len(KINDS), width - 1, vocab), 1 / vocab, np.float32)
    output, after = run_verify(drafts, logits, *KINDS, state=state, draft_probs=probs)
    without = [row for row in range(len(KINDS)) if drafts[row, 0] < 0]
    for mine, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(single), strict=True):
        wide = mine.ndim > 1
        np.testing.assert_array_equal(*((x[:, 0] if wide else x)[without] for x in (mine, theirs)))
    assert (output.tokens[without, 1:] == 0).all()
    same_bits(after, counted)  # row 4 has no slot


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b34_a_position_without_numbers_fails_its_row_if_it_is_used(bad):
    model = table_model(TOY)
    rows = [{**KINDS[1]}, {**KINDS[4]}, {**KINDS[5]}, {}]
    state = started()
    truth, _, _ = one_by_one(model, [4] * 4, *rows, state=state)
    drafts = [tokens[:3] for tokens in truth]
    drafts[2] = [truth[2][0], (truth[2][1] + 1) % TOY, 5]
    clean, clean_state = run_verify(
        padded_drafts(drafts, 4), logits_behind(model, drafts, 4), *rows, state=state
    )
    assert clean.num_accepted.tolist() == [3, 3, 1, 3]
    for row in range(4):
        for place in range(4):
            logits = logits_behind(model, drafts, 4)
            if bad == -np.inf:
                logits[row, place] = bad
            else:
                logits[row, place, 3] = bad
            output, after = run_verify(padded_drafts(drafts, 4), logits, *rows, state=state)
            used = place <= clean.num_accepted[row]
            others = [other for other in range(4) if other != row or not used]
            assert output.ok.tolist() == [other in others for other in range(4)]
            for other in others:
                count = clean.num_accepted[other]
                assert output.num_accepted[other] == count
                new, expected = (one.tokens[other, : count + 1] for one in (output, clean))
                np.testing.assert_array_equal(new, expected)
            expected = clean_state.output_counts.copy()
            if used:
                assert output.num_accepted[row] == 0
                assert (output.tokens[row] == 0).all()
                slot = rows[row].get("slot", 0)
                expected[slot] = state.output_counts[slot]
            np.testing.assert_array_equal(after.output_counts, expected)


def test_idle_rows_and_rows_without_numbers_leave_the_others_their_bits():
    model = table_model(TOY)
    idle = {"active": False, "temperature": 1.0, "slot": 2, "num_logprobs": 5}
    drafts = [[1, 2, 3], [4, 5], [], [6]]
    output, after = run_verify(
        padded_drafts(drafts, 4), logits_behind(model, drafts, 4), KINDS[1], idle, KINDS[4], idle
    )
    assert output.ok.all()
    assert (output.tokens[[1, 3]] == 0).all()
    assert (output.num_accepted[[1, 3]] == 0).all()
    assert after.output_counts[2].sum() == 0


def test_b38_drafts_beyond_the_vocabulary_end_their_rows_drafts():
    model = table_model(TOY)
    rows = [KINDS[1], KINDS[2], KINDS[5], KINDS[7]]
    drafts = [[1, TOY + 3, 2], [TOY], [2, 3], [TOY + 63, 1]]
    logits = np.nan_to_num(logits_behind(model, drafts, 4), nan=9.0)
    output, after = run_verify(padded_drafts(drafts, 4), logits, *rows, state=started())
    cut = padded_drafts([[1], [], [2, 3], []], 4)
    same_bits((output, after), run_verify(cut, logits, *rows, state=started()))
    assert output.ok.all()


@pytest.mark.parametrize("temperature", [1e-45, 1e-7, 1e-3])
@pytest.mark.parametrize("stochastic", [False, True])
def test_b18_small_temperatures_tend_to_the_argmax_with_drafts_too(temperature, stochastic):
    rng = np.random.default_rng(3)
    logits = rng.permuted(np.tile(np.arange(float(TOY)), (4, 4, 1)), axis=2)
    logits[2, :, rng.random(TOY) < 0.5] = -np.inf
    best = logits.argmax(axis=2)
    drafts = best[:, :3].copy()
    drafts[1, 1] = (drafts[1, 1] + 1) % TOY
    probs = np.full((4, 3, TOY), 1 / TOY, np.float32) if stochastic else None
    rows = [{"temperature": temperature, "seed": row} for row in range(4)]
    output, _ = run_verify(drafts, logits, *rows, draft_probs=probs)
    assert output.ok.all()
    assert output.num_accepted.tolist() == [3, 1, 3, 3]
    for row, count in enumerate(output.num_accepted):
        np.testing.assert_array_equal(output.tokens[row, : count + 1], best[row, : count + 1])


def test_a_state_narrower_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="counts 5 tokens, the vocabulary has 8"):
        run_verify(np.zeros((1, 1)), np.zeros((1, 2, 8)), {}, state=make_state(2, 5))
