"""Cache, chunking, memory pressure, the loop, batching and n change no token: greedy, sampled, with
penalties."""

from functools import cache

import pytest

from jaxserve.sampling_params import SamplingParams
from tests.support.matrix import (
    AXES,
    MAX_TOKENS,
    PLAIN,
    MatrixEngines,
    Setting,
    assert_same_tokens,
    covering,
    settings,
    without_host_memory,
)
from tests.support.tiny_engine import Run, tiny_model

KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.9, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True
    ),
    "penalties": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={65: 3.0},
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
    "seeded-penalties": SamplingParams(
        temperature=1.0,
        top_k=40,
        min_p=0.01,
        seed=-3,
        frequency_penalty=0.7,
        max_tokens=MAX_TOKENS,
        min_tokens=MAX_TOKENS - 2,
    ),
}


@pytest.fixture(scope="module")
def engines() -> MatrixEngines:
    return MatrixEngines(tiny_model())


@cache
def expected(engines: MatrixEngines, kind: str, n: int) -> Run:
    return engines.run(PLAIN[n], KINDS[kind])


def check(engines: MatrixEngines, setting: Setting, kind: str) -> None:
    got = engines.run(setting, KINDS[kind])
    assert_same_tokens(expected(engines, kind, setting.n), got)


@pytest.mark.slow
@pytest.mark.parametrize("setting", without_host_memory(), ids=lambda s: s.name)
def test_greedy_tokens_are_the_same_everywhere(setting: Setting, engines: MatrixEngines) -> None:
    check(engines, setting, "greedy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", covering(2), ids=lambda s: s.name)
def test_tokens_of_every_kind_are_the_same(
    setting: Setting, kind: str, engines: MatrixEngines
) -> None:
    check(engines, setting, kind)


def test_choices_of_a_seeded_request_differ(engines: MatrixEngines) -> None:
    tokens = expected(engines, "seeded", 4).tokens
    assert len({tuple(tokens[f"0-{choice}"]) for choice in range(4)}) == 4


def test_any_two_values_meet_in_the_chosen_cells() -> None:
    for name, values in AXES.items():
        for other, others in AXES.items():
            met = {(getattr(cell, name), getattr(cell, other)) for cell in covering(2)}
            assert name == other or len(met) == len(values) * len(others)
    assert len(covering(2)) < len(covering(3)) < len(settings())


def test_the_cells_were_what_they_are_named_after(engines: MatrixEngines) -> None:
    tight = Setting("host", None, tight_pool=True, asynchronous=True, batched=True, n=4)
    engines.run(tight, KINDS["greedy"])
    assert min(engines.stored_pages, engines.loaded_pages, engines.preemptions) > 0
