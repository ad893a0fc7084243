"""LLM with prompts that come one by one, results as they end, time limits and salts."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from tests.support.fake_llm import A, MakeLLM, make_llms

WORDS = ["abcdefgh"[: 1 + i % 8] for i in range(60)]
ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    yield from make_llms(monkeypatch)


def test_prompts_of_an_iterator_come_back_in_order(make):
    llm, engine = make(config={"max_batch_rows": 2, "max_queue": 2})
    outputs = llm.generate((word for word in WORDS), use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == WORDS
    assert engine.max_open <= 4
    assert llm.generate(iter(()), use_tqdm=False) == []


def test_results_are_handed_out_as_they_end(make):
    llm, _ = make()
    lengths = [50, 1, 20, 3]
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in lengths]
    ended = list(llm.stream_results(["a"] * 4, params))
    assert [index for index, _ in ended] == [1, 3, 2, 0]
    assert all(len(o.outputs[0].token_ids) == lengths[index] for index, o in ended)
    ((index, output),) = llm.stream_results("abc")  # a text is one prompt, not three
    assert (index, output.prompt, output.outputs[0].text) == (0, "abc", "abc")


def test_an_endless_source_is_read_as_there_is_room(make):
    llm, engine = make(config={"max_batch_rows": 2, "max_queue": 2})
    read = itertools.count()

    def source() -> Iterator[Any]:
        while True:
            yield {"prompt_token_ids": [A, A + next(read) % 8]}

    results = llm.stream_results(source())
    taken = [output for _, output in itertools.islice(results, 100)]
    assert len(taken) == 100
    assert next(read) <= 100 + 10
    results.close()
    assert engine.num_open == 0


def test_prompts_may_be_made_of_earlier_outputs(make):
    llm, _ = make()

    def more() -> Iterator[str]:
        for word in ("ab", "cd"):
            yield llm.generate(word, use_tqdm=False)[0].outputs[0].text + "h"

    texts = {}
    for index, output in llm.stream_results(more()):
        again = llm.generate(output.outputs[0].text, use_tqdm=False)
        texts[index] = again[0].outputs[0].text
    assert texts == {0: "abh", 1: "cdh"}
    assert [o.outputs[0].text for o in llm.generate(more(), use_tqdm=False)] == ["abh", "cdh"]


def test_b06_a_bad_prompt_of_an_iterator_ends_what_is_open(make):
    llm, engine = make(script=[A])
    with pytest.raises(InvalidRequestError, match=r"^prompt 2: a prompt of type int"):
        llm.generate(iter(["a", "b", 5, "c"]), ENDLESS, use_tqdm=False)
    assert engine.num_open == 0
    with pytest.raises(InvalidRequestError, match="1 sampling_params and more prompts"):
        llm.generate(iter(["a", "b"]), iter([ENDLESS]), use_tqdm=False)
    for prompts in (5, b"abc", None):
        with pytest.raises(InvalidRequestError, match="not a list"):
            llm.stream_results(prompts)


def test_timeout_ends_with_what_there_is(make):
    llm, engine = make(script=[A], step_seconds=0.01)
    (output,) = llm.generate("a", ENDLESS, use_tqdm=False, timeout=0.15)
    assert output.outputs[0].finish_reason == "timeout"
    assert set(output.outputs[0].text) == {"a"}
    assert output.finished
    assert engine.num_open == 0
    (output,) = llm.chat([{"role": "user", "content": "a"}], ENDLESS, False, timeout=0.15)
    assert output.outputs[0].finish_reason == "timeout"
    for timeout in (0, -1, float("nan"), "5", True):
        with pytest.raises(InvalidRequestError, match=r"^prompt 0: timeout must be"):
            llm.generate("a", use_tqdm=False, timeout=timeout)


def test_cache_salt_is_part_of_a_prompt(make):
    llm, engine = make()
    prompts = [{"prompt": "ab", "cache_salt": "mine"}, {"prompt_token_ids": [A], "prompt": "a"}]
    llm.generate(prompts, use_tqdm=False)
    assert [request.cache_salt for request in engine.added] == ["mine", ""]
    with pytest.raises(InvalidRequestError, match=r"^prompt 0: cache_salt must be"):
        llm.generate({"prompt": "ab", "cache_salt": 5}, use_tqdm=False)


def test_cached_tokens_are_those_of_the_first_choice(make, monkeypatch):
    from dataclasses import replace

    llm, engine = make()
    advance = engine._advance

    def cached(request: Any) -> Any:
        return replace(advance(request), num_cached_tokens=7 if request.choice else 2)

    monkeypatch.setattr(engine, "_advance", cached)
    (output,) = llm.generate("abcd", SamplingParams(n=3), use_tqdm=False)
    assert output.num_cached_tokens == 2


def test_progress_of_unknown_length_goes_to_stderr(make, capfd):
    llm, _ = make()
    assert len(llm.generate(iter(["a", "b"]))) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "prompts 2/?" in err
    assert "tok/s" in err
