"""Chunking, memory pressure, batching and n change no token: greedy, sampled, with penalties."""

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.support.matrix import Setting, assert_same_tokens, settings
from tests.support.tiny_engine import (
    AMPLE,
    TIGHT,
    drive,
    random_prompts,
    request,
    tiny_engine,
    tiny_model,
)

KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=16, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={65: 3.0},
        max_tokens=16,
        ignore_eos=True,
    ),
    "seeded-penalties": SamplingParams(
        temperature=1.0,
        top_k=40,
        min_p=0.01,
        seed=-3,
        frequency_penalty=0.7,
        max_tokens=16,
        min_tokens=14,
    ),
}
PROMPTS = random_prompts(4, (1, 60))
MODEL = tiny_model()


@pytest.fixture(scope="module")
def engines() -> dict[tuple[int, int | None], Engine]:
    return {
        (pages, chunk): tiny_engine(MODEL, num_pages=pages, max_chunk=chunk)
        for pages in (AMPLE, TIGHT)
        for chunk in (None, 16, 7)
    }


def requests(params: SamplingParams, n: int) -> list[Request]:
    return [
        request(f"{i}-{choice}", prompt, params, choice=choice)
        for i, prompt in enumerate(PROMPTS)
        for choice in range(n)
    ]


@pytest.fixture(scope="module")
def expected(engines: dict) -> dict:
    """Each request alone, whole prompts, ample pool."""
    engine = engines[AMPLE, None]
    return {
        (kind, n): drive(engine, requests(params, n), together=False)
        for kind, params in KINDS.items()
        for n in (1, 4)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", settings(), ids=lambda s: s.name)
def test_same_tokens_everywhere(setting: Setting, kind: str, engines: dict, expected: dict) -> None:
    engine = engines[TIGHT if setting.tight_pool else AMPLE, setting.chunk]
    got = drive(engine, requests(KINDS[kind], setting.n), together=setting.batched)
    assert_same_tokens(expected[kind, setting.n], got)
    if setting.tight_pool and setting.batched:
        assert got.preemptions > 0, "the tight pool should have made somebody wait"


def test_choices_of_a_seeded_request_differ(expected: dict) -> None:
    tokens = expected["seeded", 4].tokens
    assert len({tuple(tokens[f"0-{choice}"]) for choice in range(4)}) == 4
