import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sampling import make_state, set_slot
from tests.support.sampling_runs import SLOTS, TOY, run, wide


def penalised(logits, prompt, output, repetition=1.0, presence=0.0, frequency=0.0):
    """OpenAI's and CTRL's formulas in float64, from the tokens themselves."""
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        logits[token] *= repetition if logits[token] <= 0 else 1 / repetition
    for token in set(output):
        logits[token] -= frequency * output.count(token) + presence
    return logits


CASES = [
    {"repetition": 1.3},
    {"repetition": 0.5},
    {"presence": 1.5},
    {"presence": -1.0},
    {"frequency": 0.7},
    {"frequency": -0.3},
    {"repetition": 1.8, "presence": 0.4, "frequency": 0.9},
]


def raised_by(settings):
    return {f"{name}_penalty": value for name, value in settings.items()}


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_penalties_follow_the_formulas(settings):
    """Read off by duels: a seen token against one that no penalty touches, placed a hair above or
    below where the formula puts the seen one."""
    rng = np.random.default_rng(5)
    prompt, output = [1, 2, 2, 30], [2, 7, 7, 7, 9]
    state = make_state(SLOTS, TOY)
    counts = np.bincount(output, minlength=TOY).astype(np.int32)
    state = set_slot(state, 1, np.isin(np.arange(TOY), prompt), counts)
    logits = rng.normal(size=TOY).astype(np.float32)
    expected = penalised(logits, prompt, output, **settings)
    row = {"slot": 1, **raised_by(settings)}
    assert run(logits, row, state=state)[0].tokens[0, 0] == expected.argmax()
    other = 12  # neither in the prompt nor in the output
    for token in (1, 2, 7, 9, 30):
        for shift, winner in ((-1e-3, token), (1e-3, other)):
            duel = np.full(TOY, -1e4, np.float32)
            duel[token] = logits[token]
            duel[other] = expected[token] + shift
            assert run(duel, row, state=state)[0].tokens[0, 0] == winner


def test_neutral_rows_and_rows_without_a_slot_are_untouched():
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(3, TOY)).astype(np.float32) * 1e-3
    state = make_state(SLOTS, TOY)
    everything = np.ones(TOY, bool)
    state = set_slot(state, 1, everything, np.full(TOY, 5, np.int32))
    lopsided = np.where(np.arange(TOY) == logits[2].argmax(), 3, 0).astype(np.int32)
    state = set_slot(state, 2, ~everything, lopsided)
    strong = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    output, _ = run(logits, {"slot": 1}, {"slot": 0, **strong}, {"slot": 2, **strong}, state=state)
    assert output.tokens[0, 0] == logits[0].argmax()
    assert output.tokens[1, 0] == logits[1].argmax()
    assert output.tokens[2, 0] != logits[2].argmax()


def test_a_frequency_penalty_walks_through_equal_tokens():
    logits = wide(*[0.0] * 6)
    state = make_state(SLOTS, TOY)
    drawn = []
    for _ in range(12):
        output, state = run(logits, {"slot": 1, "frequency_penalty": 1.0}, state=state)
        drawn.append(int(output.tokens[0, 0]))
    assert drawn == [0, 1, 2, 3, 4, 5] * 2


def test_a_repetition_penalty_sees_the_prompt_and_the_others_do_not():
    logits = wide(2.0, 1.9, 1.8, 0.0)
    first = np.arange(TOY) == 0
    state = set_slot(make_state(SLOTS, TOY), 1, first, np.zeros(TOY, np.int32))
    for settings, expected in (
        ({"repetition_penalty": 1.5}, 1),
        ({"presence_penalty": 2.0}, 0),
        ({"frequency_penalty": 2.0}, 0),
    ):
        output, _ = run(logits, {"slot": 1, **settings}, state=state)
        assert output.tokens[0, 0] == expected


def test_transformers_computes_the_same_repetition_penalty():
    golden = json.loads((Path(__file__).parent / "filters_by_transformers.json").read_text())
    drawn = np.random.default_rng(golden["seed"]).normal(size=golden["vocab"]).astype(np.float32)
    logits = drawn * np.float32(golden["spread"])
    seen, penalty = golden["repetition"]["seen"], golden["repetition"]["penalty"]
    ours = penalised(logits, seen, [], repetition=penalty)
    for token, value in golden["repetition"]["logits"].items():
        assert ours[int(token)] == pytest.approx(value, rel=1e-6)
