"""A draft model beside the target: drafts that hold, drafts that do not, and no output changed."""

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    AMPLE,
    SMALL,
    TIGHT,
    drive,
    random_prompts,
    request,
    tiny_model,
    with_pages,
)

TARGET, OTHER = tiny_model(), tiny_model(1)
PROGRAMS = SharedPrograms()
PROMPTS = random_prompts(6, (3, 70), seed=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True, seed=11)
PENALISED = replace(SAMPLED, presence_penalty=0.8, repetition_penalty=1.2)


def make(draft: LoadedModel | None, num_drafts: int = 4, **settings: Any) -> Engine:
    speculative = None
    if draft is not None:
        speculative = SpeculativeConfig("draft-model", num_drafts, model=draft.name, adaptive=False)
    config = EngineConfig(**{**SMALL, "num_pages": AMPLE, "speculative": speculative, **settings})
    engine = Engine(TARGET, config, draft=draft, loader=PROGRAMS)
    engine.warm_up()
    return engine


def requests(params: SamplingParams) -> list:
    return [request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
@pytest.mark.parametrize("draft", [TARGET, OTHER], ids=["itself", "another"])
@pytest.mark.parametrize("pages", [AMPLE, TIGHT])
def test_no_token_changes(params: SamplingParams, draft: LoadedModel, pages: int) -> None:
    plain = drive(make(None), requests(params))
    engine = with_pages(make(draft), pages)
    run = drive(engine, requests(params))
    assert run.tokens == plain.tokens
    assert engine.runner.late_compiles == 0
    speculation = engine.speculation
    assert speculation is not None
    assert speculation.num_drafts > 0
    if pages == AMPLE and draft is OTHER:
        assert speculation.num_accepted < speculation.num_drafted


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """Sampled drafts too: both draw with the same noise. Until the last token, whose row is cut."""
    for params in (GREEDY, SAMPLED):
        engine = make(TARGET)
        drive(engine, requests(params))
        speculation = engine.speculation
        assert speculation is not None
        assert speculation.num_accepted == speculation.num_drafted > 0


def test_b18_cold_requests_say_what_greedy_ones_do() -> None:
    """The draft model draws at their temperature too."""
    engine = make(OTHER)
    for temperature in (1e-45, 1e-7, 1e-3):
        cold = replace(GREEDY, temperature=temperature, seed=3)
        run = drive(engine, requests(cold))
        assert run.tokens == drive(make(None), requests(GREEDY)).tokens
        assert run.errors == {}
    speculation = engine.speculation
    assert speculation is not None
    assert speculation.num_drafted > 0


def test_an_audit_finds_nothing() -> None:
    engine = make(TARGET, speculative_audit=1.0)
    expected = drive(make(None), requests(PENALISED))
    assert drive(engine, requests(PENALISED)).tokens == expected.tokens
    speculation = engine.speculation
    assert speculation is not None
    assert speculation.num_audited > 0
    assert speculation.num_audit_mismatches == 0


def test_what_was_decoded_without_drafts_is_caught_up_with() -> None:
    engine = make(TARGET)
    one = request("one", PROMPTS[0], replace(GREEDY, max_tokens=40, num_speculative_tokens=0))
    engine.add(one)
    while len(one.output_token_ids) < 12:
        engine.step()
    assert engine.speculation is not None
    assert engine.speculation.num_drafts == 0
    one.params = replace(one.params, num_speculative_tokens=4)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.speculation.num_accepted == engine.speculation.num_drafted > 0
    plain = drive(make(None), [request("one", PROMPTS[0], replace(GREEDY, max_tokens=40))])
    assert one.output_token_ids == plain.tokens["one"]


def test_a_draft_model_that_fails_costs_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(TARGET)
    draft = engine._draft
    assert draft is not None

    def broken(*args: object) -> None:
        raise RuntimeError("device lost the step")

    monkeypatch.setattr(draft._drafter, "draft", broken)
    run = drive(engine, requests(GREEDY))
    assert run.tokens == drive(make(None), requests(GREEDY)).tokens
    assert "draft-model failed (3 in a row)" in caplog.text
    assert engine.speculation is not None
    assert engine.speculation.num_drafts == 0


def test_models_that_do_not_fit_are_refused() -> None:
    wide = tiny_model(vocab_size=TARGET.vocab_size + 8)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        make(replace(wide, vocab_size=TARGET.vocab_size + 8))
    with pytest.raises(InvalidRequestError, match="context of 64 tokens"):
        make(replace(OTHER, max_model_len=64))
