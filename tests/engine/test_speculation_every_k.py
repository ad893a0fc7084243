"""Greedy ids with 1 to 8 drafts, in batches of 1 and of 8, by every method, are the plain ones."""

from functools import cache

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.shared_programs import SharedPrograms
from tests.support.speculating import METHODS, ROWS, ask_greedy, make, model, prompts, speculation
from tests.support.tiny_engine import AMPLE, SMALL, Run, drive, tiny_model

NUM_PROMPTS = 50
DRAFT_MODEL = "draft-model"
DRAFT_PROGRAMS = {False: SharedPrograms(), True: SharedPrograms()}  # the second: k = 8
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["batch 1", "batch 8"])
EVERY_METHOD = pytest.mark.parametrize("method", [*METHODS, DRAFT_MODEL])


def engine_with(method: str, k: int) -> Engine:
    if method != DRAFT_MODEL:
        return make(speculation(method, k))
    draft = tiny_model(1)
    speculative = SpeculativeConfig(DRAFT_MODEL, k, model=draft.name, adaptive=False)
    fields = {**SMALL, "max_batch_rows": ROWS, "max_batch_tokens": 16, "num_pages": AMPLE}
    engine = Engine(
        model(),
        EngineConfig(**fields, speculative=speculative),
        draft=draft,
        loader=DRAFT_PROGRAMS[k == 8],
    )
    engine.warm_up()
    return engine


@cache
def said_without_drafts() -> Run:
    return drive(make(prefix_cache=False), ask_greedy(0, NUM_PROMPTS))


def check(method: str, k: int, first: int, last: int, *, together: bool) -> None:
    engine = engine_with(method, k)
    run = drive(engine, ask_greedy(first, last), together=together)
    expected = said_without_drafts().tokens
    assert run.tokens == {name: expected[name] for name in run.tokens}
    assert len(run.tokens) == last - first
    stats = engine.speculation
    assert 0 < stats.num_drafted <= k * stats.num_drafts
    assert len(stats.num_accepted_per_position) <= k


@EVERY_METHOD
@TOGETHER
@pytest.mark.parametrize("k", range(1, 9))
def test_b26_greedy_ids_of_some_prompts(method: str, together: bool, k: int) -> None:
    """Eight for each number of drafts: all 50 in the end."""
    first = (k - 1) * 6
    check(method, k, first, first + 8, together=together)


@pytest.mark.slow
@EVERY_METHOD
@TOGETHER
@pytest.mark.parametrize("k", range(1, 9))
def test_b26_greedy_ids_of_50_prompts(method: str, together: bool, k: int) -> None:
    check(method, k, 0, NUM_PROMPTS, together=together)


def test_all_prompts_had_their_turn() -> None:
    assert len(prompts()) == NUM_PROMPTS == 7 * 6 + 8
