"""EAGLE, EAGLE-3, MTP and Medusa heads beside the target: what they propose is what whole sequences
give, what is right is accepted, and no output changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.compile_cache import compilations
from jaxserve.engine.engine import Engine
from jaxserve.engine.proposers.draft_checks import check_heads
from jaxserve.engine.request import Request
from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.drafts import LoadedDraft
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.draft_heads import LAYERS, METHODS, Owed, heads, target
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import Run, drive, random_prompts, request, with_pages

PROGRAMS = SharedPrograms()
K = 3
# Few shapes: a test's time is XLA's.
SETTINGS = {"max_batch_rows": 3, "max_batch_tokens": 16, "page_size": 4, "max_model_len": 96}
AMPLE, TIGHT = 120, 27
PROMPTS = random_prompts(5, (2, 40), seed=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=20, ignore_eos=True, seed=11)
PENALISED = replace(GREEDY, presence_penalty=0.8, repetition_penalty=1.2)
NOISE = {"eagle": 0.4, "eagle3": 0.0, "mtp": 1.0, "medusa": 1.0}


def make(draft: LoadedDraft | None, k: int = K, **settings: Any) -> Engine:
    speculative = None
    if draft is not None:
        model = None if draft.name == "mtp" else draft.name
        speculative = SpeculativeConfig(draft.draft.name, k, model=model, adaptive=False)
    config = EngineConfig(
        **{**SETTINGS, "num_pages": AMPLE, "speculative": speculative, **settings}
    )
    engine = Engine(target(), config, draft=draft, loader=PROGRAMS)
    engine.warm_up()
    return engine


def ask(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [request(str(index), prompt, params) for index, prompt in enumerate(prompts)]


def watch(engine: Engine, owed: Owed) -> list[list[int]]:
    """Check every proposal of greedy requests from now on; returns all that come."""
    proposer, seen = engine._draft, []
    assert proposer is not None
    propose = proposer.propose

    def watched(requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        proposals = propose(requests, limits)
        for asked, limit, drafts in zip(requests, limits, proposals, strict=True):
            assert len(drafts) <= limit
            if drafts:
                owed.check(asked.token_ids(0, asked.num_tokens), drafts)
                seen.append(drafts)
        return proposals

    proposer.propose = watched  # type: ignore[method-assign]
    return seen


def plain(params: SamplingParams, **options: Any) -> Run:
    settings = {name: options.pop(name) for name in ("kv_cache_dtype",) if name in options}
    return drive(make(None, **settings), ask(params, **options))


def counts(engine: Engine) -> tuple[int, int]:
    """(drafts that were verified, those of them that held)."""
    found = engine.speculation
    assert found is not None
    return found.num_drafted, found.num_accepted


def somewhat_right(method: str) -> LoadedDraft:
    """Heads of whose drafts verify steps keep any number, from none to all."""
    return heads(method, noise=NOISE[method], words=170 if method == "eagle3" else None)


@pytest.mark.parametrize("method", METHODS)
def test_proposals_are_what_whole_sequences_give(method: str) -> None:
    """Behind prompts of several chunks and verify steps with any number of drafts kept."""
    draft = somewhat_right(method)
    engine = make(draft)
    seen = watch(engine, Owed(draft))
    run = drive(engine, ask(GREEDY))
    assert run.tokens == plain(GREEDY).tokens
    drafted, accepted = counts(engine)
    assert len(seen) > 10
    assert 0 < accepted < drafted
    assert engine.speculation is not None
    kept = engine.speculation.num_accepted_per_position
    assert len(kept) == K
    assert kept[0] >= kept[-1] > 0


@pytest.mark.parametrize("method", METHODS)
def test_proposals_after_a_cache_hit_after_preemption_and_after_plain_steps(method: str) -> None:
    draft = somewhat_right(method)
    engine = make(draft)
    seen = watch(engine, Owed(draft))
    shared = PROMPTS[0][:1] * 24
    hits = drive(engine, ask(GREEDY, [shared + PROMPTS[1], shared + PROMPTS[2]]), together=False)
    assert hits.cached_tokens["1"] >= 24
    number = len(seen)
    assert number > 0

    params = replace(GREEDY, max_tokens=64, num_speculative_tokens=0)
    one = request("one", [65, 66, 67], params)
    engine.add(one)
    while len(one.output_token_ids) < 12:
        engine.step()
    assert len(seen) == number
    one.params = replace(one.params, num_speculative_tokens=K)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert len(seen) > number

    tight = with_pages(make(draft), TIGHT)
    seen = watch(tight, Owed(draft))
    run = drive(tight, ask(GREEDY))
    assert run.preemptions > 0
    assert run.tokens == plain(GREEDY).tokens
    assert len(seen) > 0


@pytest.mark.parametrize("params", [PENALISED, SAMPLED], ids=["penalised", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_no_token_changes(method: str, params: SamplingParams) -> None:
    """And sampled drafts hold, drawn with the target's noise."""
    engine = make(heads(method))
    before = compilations.count
    run = drive(engine, ask(params))
    assert compilations.count == before, "something was compiled after the engine was ready"
    assert run.tokens == plain(params).tokens
    drafted, accepted = counts(engine)
    assert drafted > accepted / 2 > 0


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_are_right_save_steps(method: str) -> None:
    engine = make(heads(method))
    run = drive(engine, ask(GREEDY))
    assert run.tokens == plain(GREEDY).tokens
    drafted, accepted = counts(engine)
    assert accepted > 0.9 * drafted > 0
    assert engine.speculation is not None
    assert engine.speculation.tokens_per_step > 2


def test_one_draft_choices_and_small_keys() -> None:
    draft = somewhat_right("eagle")
    assert drive(make(draft, k=1), ask(GREEDY)).tokens == plain(GREEDY).tokens
    both = [request(f"c{choice}", PROMPTS[1], SAMPLED, choice=choice) for choice in range(2)]
    again = [request(f"c{choice}", PROMPTS[1], SAMPLED, choice=choice) for choice in range(2)]
    assert drive(make(draft), both).tokens == drive(make(None), again).tokens
    small = make(draft, kv_cache_dtype="int8")
    assert drive(small, ask(GREEDY)).tokens == plain(GREEDY, kv_cache_dtype="int8").tokens
    assert counts(small)[1] > 0


def pages_of(engine: Engine, one: Request) -> list[np.ndarray]:
    """What the pool holds of a request's tokens that were run: [tokens, ...] of every array."""
    engine._loop.drain()
    size = engine.page_size
    handle = engine.runner.read_pages(one.pages[0][: -(-one.num_computed // size)])
    return [pages.reshape(-1, *pages.shape[2:])[: one.num_computed] for pages in handle.result()]


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_rejected_drafts_leave_keys_and_features_as_they_were(method: str) -> None:
    """Held against an engine with the same heads whose request wants no drafts."""
    draft = somewhat_right(method)
    kept = []
    for number in (K, 0):
        engine = make(draft)
        params = replace(GREEDY, max_tokens=40, num_speculative_tokens=number)
        one = request("one", PROMPTS[4], params)
        engine.add(one)
        while len(one.output_token_ids) < 16:
            engine.step()
        kept.append(pages_of(engine, one))
        if number:
            drafted, accepted = counts(engine)
            assert accepted < drafted
    tokens = min(len(pages[0]) for pages in kept)
    assert tokens > len(PROMPTS[4])
    for drafted_pages, plain_pages in zip(*kept, strict=True):
        np.testing.assert_allclose(
            drafted_pages[:tokens], plain_pages[:tokens], rtol=1e-4, atol=1e-5
        )


def test_a_saved_run_brings_its_features_along() -> None:
    draft, longer = heads("eagle"), replace(GREEDY, max_tokens=50)
    prompt = PROMPTS[4][:12]  # so short that the heads catch up before its end
    first = make(draft)
    one = request("one", prompt, longer)
    first.add(one)
    while len(one.output_token_ids) < 6:
        first.step()
    state = first.states.copy_out("one").result(first.states.form)
    assert state.pages is not None
    second = make(draft)
    seen = watch(second, Owed(draft))
    again = request("one", state.prompt_token_ids, longer)
    again.output_token_ids = list(state.output_token_ids)
    second.states.put_back(again, state.pages)
    while second.has_work:
        second.step()
    assert again.num_cached_tokens == len(prompt)  # of the output nobody counts them
    assert len(seen) > 0
    assert again.output_token_ids == plain(longer, prompts=[prompt]).tokens["0"]


def test_heads_that_fail_cost_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(heads("eagle"))
    assert engine._draft is not None

    def broken(*args: object) -> None:
        raise RuntimeError("device lost the step")

    monkeypatch.setattr(engine._draft._drafter, "draft", broken)
    assert drive(engine, ask(GREEDY)).tokens == plain(GREEDY).tokens
    assert "eagle failed (3 in a row)" in caplog.text
    assert counts(engine) == (0, 0)


def test_what_does_not_fit_is_refused_at_start() -> None:
    draft = heads("medusa")
    with pytest.raises(InvalidRequestError, match="is 4 and medusa has 3 heads"):
        make(draft, k=4)
    eagle3 = heads("eagle3")
    deeper = replace(eagle3.config, target_layers=(0, LAYERS))
    with pytest.raises(ModelLoadError, match=rf"no tap 'layer_input\.{LAYERS}', which eagle3"):
        make(replace(eagle3, config=deeper))
    windows = replace(target().config, windows=(8,) * LAYERS)
    speculative = SpeculativeConfig("medusa", 2, model="medusa")
    config = EngineConfig(**SETTINGS, num_pages=AMPLE, speculative=speculative)
    with pytest.raises(InvalidRequestError, match="every layer of tiny has a window"):
        Engine(replace(target(), config=windows), config, draft=draft)
    with pytest.raises(InvalidRequestError, match="medusa needs a draft and this engine was given"):
        Engine(target(), config, loader=PROGRAMS)
    params = {"table" if name == "embed" else name: x for name, x in target().params.items()}
    with pytest.raises(InvalidRequestError, match="no table 'embed', whose rows eagle reads"):
        check_heads(heads("eagle"), replace(target(), params=params), 3)
