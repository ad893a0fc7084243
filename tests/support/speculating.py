"""Engines over one tiny model, with speculation and without; prompts that drafts are good for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import random_prompts, request, tiny_engine, tiny_model

METHODS = ("ngram", "suffix", "lookahead")
ROWS = 8
MAX_LEN = 128
MOST_SHARED = 7  # drafts; with more the step before is kept in a wider array, by other programs
PROGRAMS = {False: SharedPrograms(), True: SharedPrograms()}


@cache
def model() -> LoadedModel:
    return tiny_model()


def speculation(method: str, k: int = 3, **more: Any) -> SpeculativeConfig:
    """Always on, whatever it costs."""
    return SpeculativeConfig(method=method, num_speculative_tokens=k, **{"adaptive": False, **more})


def make(speculative: SpeculativeConfig | None = None, **settings: Any) -> Engine:
    """An engine whose programs all engines made here share, as far as their shapes agree."""
    fields = {"max_batch_rows": ROWS, "max_batch_tokens": 16, **settings}
    wide = speculative is not None and speculative.num_speculative_tokens > MOST_SHARED
    return tiny_engine(model(), loader=PROGRAMS[wide], speculative=speculative, **fields)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """50: random ones, and ones that repeat a few tokens."""
    rng = np.random.default_rng(3)
    chosen = [tuple(prompt) for prompt in random_prompts(25, (3, 24), seed=2)]
    for _ in range(25):
        unit = rng.integers(0, 256, int(rng.integers(1, 7))).tolist()
        chosen.append(tuple((unit * 28)[: int(rng.integers(8, 28))]))
    return tuple(chosen)


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
GREEDY_KINDS = (
    GREEDY,
    replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    replace(GREEDY, logit_bias={65: 3.0, 7: -20.0}),
    replace(GREEDY, logit_bias={66: 2.0}, frequency_penalty=0.5),
)


def ask_greedy(first: int, last: int) -> list[Request]:
    """Requests for prompts first to last - 1, plain, with penalties, with bias and with both."""
    return [
        request(f"r{i}", prompts()[i], GREEDY_KINDS[i % len(GREEDY_KINDS)], seed=100 + i)
        for i in range(first, last)
    ]


def ask(params: SamplingParams, which: Sequence[Sequence[int]] | None = None) -> list[Request]:
    """A request for each prompt: r0, r1 ..., each with a seed of its own unless params has one."""
    chosen = prompts() if which is None else which
    return [request(f"r{i}", prompt, params, seed=100 + i) for i, prompt in enumerate(chosen)]
