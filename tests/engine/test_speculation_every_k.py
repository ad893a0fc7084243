"""Greedy ids with 1 to 8 drafts, in batches of 1 and of 8, by every method, are the plain ones."""

from dataclasses import replace
from functools import cache

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.shared_programs import SharedPrograms
from tests.support.speculating import METHODS, ROWS, ask_greedy, make, model, prompts, speculation
from tests.support.tiny_engine import AMPLE, SMALL, Run, drive, tiny_model

NUM_PROMPTS = 50
MOST = 8
DRAFT_MODEL = "draft-model"
DRAFT_PROGRAMS = {False: SharedPrograms(), True: SharedPrograms()}  # the second: of MOST drafts
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["batch 1", "batch 8"])
EVERY_METHOD = pytest.mark.parametrize("method", [*METHODS, DRAFT_MODEL])


def engine_with(method: str, k: int) -> Engine:
    if method != DRAFT_MODEL:
        return make(speculation(method, k))
    draft = tiny_model(1)
    speculative = SpeculativeConfig(DRAFT_MODEL, k, model=draft.name, adaptive=False)
    # A draft model reads as many tokens of prompts in a step: few steps, so that it soon drafts.
    fields = {**SMALL, "max_batch_rows": ROWS, "max_batch_tokens": 64, "num_pages": AMPLE}
    engine = Engine(
        model(),
        EngineConfig(**fields, speculative=speculative),
        draft=draft,
        loader=DRAFT_PROGRAMS[k == MOST],
    )
    engine.warm_up()
    return engine


@cache
def said_without_drafts() -> Run:
    return drive(make(prefix_cache=False), ask_greedy(0, NUM_PROMPTS))


@cache
def widest_engine(method: str) -> Engine:
    return engine_with(method, MOST)


def check(engine: Engine, k: int, first: int, last: int, *, together: bool) -> None:
    """k: the requests' own wish."""
    before = engine.speculation
    requests = ask_greedy(first, last)
    for item in requests:
        item.params = replace(item.params, num_speculative_tokens=k)
    run = drive(engine, requests, together=together)
    expected = said_without_drafts().tokens
    assert run.tokens == {name: expected[name] for name in run.tokens}
    assert len(run.tokens) == last - first
    stats = engine.speculation.since(before)
    assert 0 < stats.num_drafted <= k * stats.num_drafts


@EVERY_METHOD
@TOGETHER
def test_b26_greedy_ids_of_some_prompts(method: str, together: bool) -> None:
    """As many drafts as the requests wish, eight requests for each number: all 50 prompts."""
    for k in range(1, MOST + 1):
        first = (k - 1) * 6
        check(widest_engine(method), k, first, first + 8, together=together)


@pytest.mark.slow
@TOGETHER
@pytest.mark.parametrize("k", [1, 4, MOST])
def test_b26_greedy_ids_of_50_prompts(together: bool, k: int) -> None:
    """As many drafts as the engine is made for, which decides its shapes. Where drafts come from
    does not."""
    check(engine_with("ngram", k), k, 0, NUM_PROMPTS, together=together)


def test_all_prompts_had_their_turn() -> None:
    assert len(prompts()) == NUM_PROMPTS == 7 * 6 + 8
