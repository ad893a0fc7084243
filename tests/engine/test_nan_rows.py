"""A row whose KV is not numbers fails alone, and nothing that it wrote is used again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_windowed_pages import model as windowed_model
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    Run,
    drive,
    random_prompts,
    request,
    single_steps,
    take_in,
    tiny_engine,
    tiny_model,
)

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT, OTHER = random_prompts(2, (45, 45), seed=4)
MODELS = {"llama": (tiny_model, {}), "windowed": (windowed_model, {"attention_backend": "cpu"})}
PROGRAMS = {kind: SharedPrograms() for kind in MODELS}
NAN = "the model's logits are not numbers (NaN) for this request"


def make_engine(kind: str, **settings: Any) -> Engine:
    make, options = MODELS[kind]
    return single_steps(tiny_engine(make(), loader=PROGRAMS[kind], **options, **settings))


def spoil(engine: Engine, pages: Sequence[int]) -> None:
    """As if the device had written NaN into these pages."""
    for first in range(0, len(pages), 8):
        some = pages[first : first + 8]
        contents = engine.runner.read_pages(some).result()
        engine.runner.write_pages(some, tuple(np.full_like(leaf, np.nan) for leaf in contents))


def run_for(engine: Engine, item: Request, tokens: int) -> None:
    engine.add(item)
    while len(item.output_token_ids) < tokens:
        engine.step()


def finish(engine: Engine) -> Run:
    run = Run()
    while engine.has_work:
        for event in engine.step():
            take_in(run, event)
        engine.check_integrity()
    assert engine.kv_manager.num_used == 0
    return run


def assert_clean(engine: Engine) -> None:
    for leaf in jax.tree.leaves(engine.runner.pool):
        assert bool(jnp.isfinite(leaf).all()), "a page that nobody holds is not clean"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("page", [0, -2])
def test_what_a_failed_row_wrote_is_cleaned_and_not_found(kind: str, page: int) -> None:
    """In any group, first page or last: the same prompt, and the next user of the pages, get
    right results; a row beside it does not notice."""
    engine = make_engine(kind, num_pages=120)
    expected = drive(make_engine(kind), [request("p", PROMPT, PARAMS), request("o", OTHER, PARAMS)])
    for group in range(engine.shape.num_groups):
        bad, beside = request("bad", PROMPT, PARAMS), request("beside", OTHER, PARAMS)
        engine.add(beside)
        run_for(engine, bad, 3)
        spoil(engine, [[held for held in bad.pages[group] if held][page]])
        run = finish(engine)
        assert run.errors == {"bad": NAN}
        assert beside.output_token_ids == expected.tokens["o"]
        assert_clean(engine)
        hits = engine.kv_manager.stats.hit_tokens
        again = drive(engine, [request("again", PROMPT, PARAMS)])
        assert again.tokens["again"] == expected.tokens["p"]
        assert engine.kv_manager.stats.hit_tokens == hits, "pages of the failed row were found"


def test_a_prompt_that_always_fails_leaves_nothing_behind() -> None:
    model = tiny_model()
    embed = model.params["embed"].at[PROMPT[20]].set(np.nan)
    engine = tiny_engine(replace(model, params={**model.params, "embed": embed}), pages=40)
    healthy = [token for token in OTHER if token != PROMPT[20]]
    expected = drive(engine, [request("first", healthy, PARAMS)]).tokens["first"]
    for attempt in range(3):
        name, good = f"bad{attempt}", f"good{attempt}"
        both = [request(name, PROMPT, PARAMS), request(good, healthy, PARAMS)]
        run = drive(engine, both)
        assert run.errors == {name: NAN}
        assert run.tokens[good] == expected
        assert_clean(engine)


def test_all_who_share_a_spoilt_page_fail_and_who_comes_then_does_not() -> None:
    engine = make_engine("llama")
    expected = drive(make_engine("llama"), [request("p", PROMPT, PARAMS)]).tokens["p"]
    leader = request("leader", PROMPT, PARAMS)
    run_for(engine, leader, 3)
    engine.states.fork("leader", "fork")
    engine.step()
    spoil(engine, leader.pages[0][2:3])
    run = finish(engine)
    assert run.errors == {"leader": NAN, "fork": NAN}
    assert_clean(engine)
    assert drive(engine, [request("again", PROMPT, PARAMS)]).tokens["again"] == expected


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("at", [0, 2])
def test_who_shared_it_and_left_in_time_does_not_pass_it_on(how: str, at: int) -> None:
    """A branch that has copied or shared a spoilt page, and ends before it draws."""
    engine = make_engine("llama")
    expected = drive(make_engine("llama"), [request("p", PROMPT, PARAMS)]).tokens["p"]
    parent = request("parent", PROMPT, PARAMS)
    run_for(engine, parent, 6)
    fork = engine.states.fork("parent", "fork", at=5)
    spoil(engine, parent.pages[0][at : at + 1])
    engine.step()
    if how == "abort":
        engine.abort("fork")
    else:
        engine.scheduler.preempt("fork")
    run = finish(engine)
    assert run.errors["parent"] == NAN
    if how == "preempt" and "fork" not in run.errors:
        assert fork.output_token_ids == expected
    again = drive(engine, [request("again", PROMPT, PARAMS)])
    assert again.tokens["again"] == expected


def test_a_page_that_somebody_copied_inside_the_first_page() -> None:
    """They share less than a page, so nothing but its beginning tells that it is suspect."""
    engine = make_engine("llama", page_size=16)
    common = PROMPT[:12]
    bad, taker = [*common, 1, 2], [*common, *[3] * 30]
    expected = drive(make_engine("llama", page_size=16), [request("t", taker, PARAMS)]).tokens["t"]
    first = request("first", bad, PARAMS)
    run_for(engine, first, 1)
    spoil(engine, first.pages[0][:1])
    copy = request("copy", taker, PARAMS)
    manager = engine.kv_manager
    assert manager.admit(copy, first)
    assert copy.num_computed >= 5
    engine._loop.move_pages(manager.take_transfers())
    run = Run()
    while engine.has_work:
        for event in engine.step():
            take_in(run, event)
    assert run.errors == {"first": NAN}
    manager.release(copy)
    assert manager.match(request("next", taker, PARAMS)) == 0
    assert drive(engine, [request("again", taker, PARAMS)]).tokens["again"] == expected
