"""A request's state leaves one engine through a file and goes on in another one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.model_identity import ModelIdentity, model_identity
from jaxserve.engine.request import Request
from jaxserve.engine.state_file import read_state, write_state
from jaxserve.loading.loaded_model import LoadedModel
from tests.engine.test_runs import ALL, GREEDY, PENALISED
from tests.engine.test_windowed_pages import model as windowed_model
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    Run,
    drive,
    random_prompts,
    request,
    take_in,
    tiny_engine,
    tiny_model,
)

(PROMPT,) = random_prompts(1, (45, 45), seed=9)
MODELS = {
    "llama": (tiny_model, {}),
    "int8": (tiny_model, {"kv_cache_dtype": "int8"}),
    "windowed": (windowed_model, {"attention_backend": "cpu"}),
}
PROGRAMS: dict[tuple[Any, ...], SharedPrograms] = {}


def make_engine(kind: str = "llama", **overrides: Any) -> Engine:
    make, settings = MODELS[kind]
    programs = PROGRAMS.setdefault(
        (kind, overrides.get("page_size"), overrides.get("max_batch_rows")), SharedPrograms()
    )
    return tiny_engine(make(), loader=programs, **settings, **overrides)


def run_for(engine: Engine, item: Request, tokens: int) -> None:
    """Until the request has so many output tokens, with a step in flight."""
    engine.add(item)
    while len(item.output_token_ids) < tokens:
        engine.step()


def saved(engine: Engine, item: Request, path: Path) -> None:
    state = engine.states.copy_out(item.request_id).result(engine.states.form)
    engine.check_integrity()
    write_state(path, state, engine.states.identity)


def load(engine: Engine, path: Path, name: str = "loaded") -> Request:
    states = engine.states
    state = read_state(path, states.identity, states.form, engine.max_model_len)
    item = request(name, state.prompt_token_ids, state.params, choice=state.choice)
    item.seed = state.seed
    item.output_token_ids = list(state.output_token_ids)
    states.put_back(item, state.pages)
    engine.check_integrity()
    return item


def to_the_end(engine: Engine, item: Request) -> list[int]:
    """All of a request's output, once everything has ended."""
    run = Run()
    for _ in range(500):
        if not engine.has_work:
            break
        for event in engine.step():
            take_in(run, event)
        engine.check_integrity()
    assert engine.kv_manager.num_used == 0
    return item.output_token_ids


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_request_goes_on_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    engine, other, plain = (make_engine(kind, prefix_cache=cache) for cache in (True, True, False))
    for (name, params), tokens in zip(ALL.items(), (1, 9, 21), strict=True):
        whole = drive(plain, [request(name, PROMPT, params)]).tokens[name]
        item = request("saved", PROMPT, params)
        run_for(engine, item, tokens)
        path = tmp_path / f"{name}.safetensors"
        saved(engine, item, path)
        assert to_the_end(engine, item) == whole, "saving disturbed it"
        loaded = load(other, path, name)
        assert tokens <= len(loaded.output_token_ids) < 70
        hits = other.kv_manager.stats.hit_tokens
        assert to_the_end(other, loaded) == whole
        hits = other.kv_manager.stats.hit_tokens - hits
        assert hits >= len(PROMPT) + tokens - 2 * engine.page_size, "its pages were not used"


def test_pages_of_another_size_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = make_engine(), make_engine(page_size=8)
    item = request("saved", PROMPT, PENALISED)
    run_for(engine, item, 5)
    saved(engine, item, tmp_path / "run")
    whole = to_the_end(engine, item)
    loaded = load(other, tmp_path / "run")
    assert "another page_size, another arrays" in caplog.text
    assert to_the_end(other, loaded) == whole


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"pages": 34}], ids=str)
def test_without_room_for_the_pages_they_are_computed_again(
    settings: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache; or a pool that somebody else fills."""
    caplog.set_level("INFO")
    engine, other = make_engine(), make_engine(**settings)
    item = request("saved", PROMPT, GREEDY)
    run_for(engine, item, 5)
    saved(engine, item, tmp_path / "run")
    whole = to_the_end(engine, item)
    short = replace(GREEDY, max_tokens=40)
    run_for(other, request("company", random_prompts(1, (85, 85), seed=3)[0], short), 1)
    loaded = load(other, tmp_path / "run")
    assert "no room for the saved pages" in caplog.text
    assert to_the_end(other, loaded) == whole


def test_loaded_pages_push_evicted_ones_out_to_host_memory(tmp_path: Path) -> None:
    """What a page held is stored before the saved page is written over it."""
    engine, other = make_engine(), make_engine(pages=34, kv_host_memory=1 << 20)
    item = request("saved", PROMPT, GREEDY)
    run_for(engine, item, 5)
    saved(engine, item, tmp_path / "run")
    whole = to_the_end(engine, item)
    first = request("first", random_prompts(1, (58, 58), seed=3)[0], GREEDY)
    expected = drive(other, [first]).tokens["first"]
    assert to_the_end(other, load(other, tmp_path / "run")) == whole
    assert other.kv_manager.stats.stored_pages > 0
    other.kv_manager.swap_is_cheaper = True
    again = request("again", first.prompt_token_ids, GREEDY)
    assert drive(other, [again]).tokens["again"] == expected


def test_waiting_preempted_and_ended_requests(tmp_path: Path) -> None:
    """A waiting request has tokens and no pages; a preempted one keeps its output; one that has
    ended is refused."""
    engine = make_engine(max_batch_rows=1)
    whole = drive(engine, [request("w", PROMPT, GREEDY)]).tokens["w"]
    first, waiting = request("first", PROMPT, GREEDY), request("waiting", PROMPT, GREEDY)
    run_for(engine, first, 6)
    engine.add(waiting)
    saved(engine, waiting, tmp_path / "waiting")
    engine.scheduler.preempt("first")
    saved(engine, first, tmp_path / "preempted")
    assert to_the_end(engine, first) == whole
    with pytest.raises(ValueError, match="has ended cannot be saved"):
        engine.states.copy_out("first")
    for name, drawn in (("waiting", 0), ("preempted", 6)):
        states = engine.states
        state = read_state(tmp_path / name, states.identity, states.form, 128)
        assert state.pages is None
        assert len(state.output_token_ids) >= drawn
        assert to_the_end(engine, load(engine, tmp_path / name, name)) == whole


class BrokenWrite:
    """write_pages that takes the pool with it, once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.write = engine, engine.runner.write_pages

    def __call__(self, *args: object) -> None:
        self.engine.runner.write_pages = self.write  # type: ignore[method-assign]
        for leaf in jax.tree.leaves(self.engine.runner.pool):
            leaf.delete()
        raise RuntimeError("device lost the pages")


def test_a_device_that_fails_while_pages_are_put_back_changes_no_token(tmp_path: Path) -> None:
    engine = make_engine()
    item, other = request("saved", PROMPT, PENALISED), request("other", PROMPT[::-1], PENALISED)
    whole = drive(engine, [request("w", PROMPT, PENALISED), request("o", PROMPT[::-1], PENALISED)])
    run_for(engine, other, 3)
    run_for(engine, item, 5)
    saved(engine, item, tmp_path / "run")
    engine.abort("saved")
    engine.runner.write_pages = BrokenWrite(engine)  # type: ignore[assignment]
    loaded = load(engine, tmp_path / "run")
    assert to_the_end(engine, loaded) == whole.tokens["w"]
    assert other.output_token_ids == whole.tokens["o"]


def test_a_fork_that_waits_survives_the_loss_of_the_pool() -> None:
    engine = make_engine(max_batch_rows=1)
    whole = drive(engine, [request("w", PROMPT, PENALISED)]).tokens["w"]
    parent = request("parent", PROMPT, PENALISED)
    run_for(engine, parent, 5)
    child = engine.states.fork("parent", "child", at=3)
    assert child.output_token_ids == whole[:3]
    for leaf in jax.tree.leaves(engine.runner.pool):
        leaf.delete()
    assert to_the_end(engine, child) == whole
    assert parent.output_token_ids == whole


def test_forks_share_pages_copy_on_write() -> None:
    """Four branches of one request hold its pages once, and one more each."""
    for cache in (True, False):
        engine = make_engine(prefix_cache=cache)
        parent = request("parent", PROMPT, PENALISED)
        run_for(engine, parent, 3)
        alone = engine.kv_manager.num_used
        for index in range(3):
            engine.states.fork("parent", f"child{index}", seed=index)
        engine.step()
        engine.check_integrity()
        assert engine.scheduler.num_running == 4
        assert engine.kv_manager.num_used <= alone + 3 * 2
        to_the_end(engine, parent)


def identity(model: LoadedModel) -> ModelIdentity:
    return model_identity(model.model.name, model.config, model.vocab_size, model.params)


def test_other_models_are_told_apart() -> None:
    first, bits = identity(tiny_model()), tiny_model()
    assert first.compare(identity(tiny_model())) == "same"
    assert first.compare(identity(tiny_model(seed=1))) == "other"
    assert first.compare(identity(tiny_model(hidden_size=48))) == "other"
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), bits.params)
    assert first.compare(identity(replace(bits, params=half))) == "stored differently"
