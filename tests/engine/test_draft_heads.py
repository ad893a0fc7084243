"""EAGLE, EAGLE-3, MTP and Medusa heads beside the target: what they propose is what whole sequences
give, what is right is accepted, and no output changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.compile_cache import compilations
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.loading.drafts import LoadedDraft
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.draft_heads import METHODS, Owed, heads, target
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import Run, drive, random_prompts, request

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

    one = request("one", PROMPTS[3], replace(GREEDY, max_tokens=30, num_speculative_tokens=0))
    engine.add(one)
    while len(one.output_token_ids) < 12:
        engine.step()
    assert len(seen) == number
    one.params = replace(one.params, num_speculative_tokens=K)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert len(seen) > number

    tight = make(draft, num_pages=TIGHT)
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
    assert engine.speculation.tokens_per_step > 2.5


def test_one_draft_choices_and_small_keys() -> None:
    draft = somewhat_right("eagle")
    assert drive(make(draft, k=1), ask(GREEDY)).tokens == plain(GREEDY).tokens
    both = [request(f"c{choice}", PROMPTS[1], SAMPLED, choice=choice) for choice in range(2)]
    again = [request(f"c{choice}", PROMPTS[1], SAMPLED, choice=choice) for choice in range(2)]
    assert drive(make(draft), both).tokens == drive(make(None), again).tokens
    small = make(draft, kv_cache_dtype="int8")
    assert drive(small, ask(GREEDY)).tokens == plain(GREEDY, kv_cache_dtype="int8").tokens
    assert counts(small)[1] > 0
