"""Runs of the Python API: forked branches, saved requests and what may be asked of them when."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import AMPLE, SMALL, random_prompts, tiny_model

WAIT = 60.0
PROMPTS = random_prompts(4, (10, 40), seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=11)
PENALISED = SamplingParams(
    temperature=0.8,
    max_tokens=40,
    ignore_eos=True,
    seed=12,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
)
ALL = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


def make_llm(**settings: Any) -> LLM:
    return LLM(tiny_model(), **{**SMALL, "num_pages": AMPLE, **settings})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def prompt(ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids}


def whole(llm: LLM, ids: list[int], params: SamplingParams) -> list[int]:
    """What an uninterrupted request of its own draws."""
    (output,) = llm.generate([prompt(ids)], params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_run_is_what_generate_gives(llm: LLM) -> None:
    expected = whole(llm, PROMPTS[0], SEEDED)
    run = llm.start(prompt(PROMPTS[0]), SEEDED)
    deltas = list(run)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert run.wait(WAIT).token_ids == expected
    assert run.text == "".join(delta.text for delta in deltas)
    assert run.prompt_token_ids == tuple(PROMPTS[0])
    assert (run.finished, run.finish_reason, run.error, run.num_inherited) == (
        True,
        "length",
        None,
        0,
    )
    assert list(run) == deltas, "an iteration begins with the first delta"


@pytest.mark.parametrize("params", ALL.values(), ids=ALL.keys())
def test_a_branch_is_an_independent_run(llm: LLM, params: SamplingParams) -> None:
    """Forked anywhere, it goes on as the whole request does; with another seed, as a request with
    that seed whose first tokens were these."""
    expected = whole(llm, PROMPTS[1], params)
    run = llm.start(prompt(PROMPTS[1]), params).wait_for_tokens(9, WAIT)
    copy, early = run.fork(), run.fork(at=4)
    assert copy.token_ids[: copy.num_inherited] == expected[: copy.num_inherited]
    assert copy.num_inherited >= 9
    assert early.num_inherited == 4
    assert early.token_ids[:4] == expected[:4]
    for each in (run, copy, early):
        assert each.wait(WAIT).token_ids == expected
        assert each.finish_reason == "length"
    assert copy.text == early.text == run.text
