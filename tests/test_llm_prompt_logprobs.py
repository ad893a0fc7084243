"""RequestOutput.prompt_logprobs in vLLM's shape, with a scripted engine."""

from collections.abc import Iterator

import pytest

from jaxserve import SamplingParams
from jaxserve.engine.outputs import Logprob
from tests.support.fake_llm import BOS, PIECES, MakeLLM, make_llms


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    yield from make_llms(monkeypatch)


def test_one_dict_for_each_token_but_the_first(make: MakeLLM) -> None:
    llm, _ = make()
    (output,) = llm.generate("ab", SamplingParams(prompt_logprobs=2), use_tqdm=False)
    a, b = PIECES.index("a"), PIECES.index("b")
    assert output.prompt_token_ids == [BOS, a, b]
    assert output.prompt_logprobs == [
        None,
        {a: Logprob(-1.0, 2, "a"), 0: Logprob(-0.5, 1, "</s>")},
        {b: Logprob(-2.0, 2, "b"), 0: Logprob(-1.5, 1, "</s>")},
    ]
    assert next(iter(output.prompt_logprobs[1])) == a  # the token itself comes first
    assert output.outputs[0].logprobs is None


def test_several_choices_and_prompts_have_each_prompts_own_once(make: MakeLLM) -> None:
    llm, _ = make()
    outputs = llm.generate(
        ["a", "bc", {"prompt_token_ids": [BOS]}],
        SamplingParams(n=3, prompt_logprobs=0),
        use_tqdm=False,
    )
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [2, 3, 1]
    assert outputs[2].prompt_logprobs == [None]
    for output in outputs:
        ids = [next(iter(entry)) for entry in output.prompt_logprobs or () if entry]
        assert ids == output.prompt_token_ids[1:]


def test_none_without_asking(make: MakeLLM) -> None:
    llm, _ = make()
    (output,) = llm.generate("ab", SamplingParams(logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is None


def test_none_where_nothing_was_drawn(make: MakeLLM) -> None:
    llm, engine = make()
    engine.step_seconds = 0.2
    (output,) = llm.generate("ab", SamplingParams(prompt_logprobs=2), use_tqdm=False, timeout=0.05)
    assert output.outputs[0].finish_reason == "timeout"
    assert output.prompt_logprobs is None
