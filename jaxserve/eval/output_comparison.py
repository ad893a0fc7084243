"""Does a real model say the same with speculation as without? By samples, since nobody can list
what it might say: the first tokens of many outputs, with either, must look like draws of one kind.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import numpy as np

from jaxserve.engine.request_output import RequestOutput
from jaxserve.eval.chi_square import together, two_samples
from jaxserve.eval.speculation_audit import MIN_P_VALUE, Check
from jaxserve.sampling_params import SamplingParams

PROMPTS = (
    "one two three one two three one two",
    "The sun rises in the east and sets in the",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
)


class Generates(Protocol):
    """What is asked of an `LLM`."""

    def generate(
        self,
        prompts: list[str],
        sampling_params: list[SamplingParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...


# (engine seed, with speculation) -> an LLM that is closed on leaving.
MakeLLM = Callable[[int, bool], AbstractContextManager[Generates]]


def compare_outputs(
    make_llm: MakeLLM,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    samples: int,
    say: Callable[[str], None],
) -> list[Check]:
    """One test for each of the first params.max_tokens places, over all prompts, and one of whole
    outputs; then seeded requests, whose tokens must be the same with speculation and without.

    Runs of the two sides are independent: the engines have seeds of their own.
    """
    sides, seeded = [], []
    for seed, speculate in ((1, False), (2, True)):
        say(f"{samples * len(prompts)} outputs {'with' if speculate else 'without'} speculation")
        with make_llm(seed, speculate) as llm:
            sides.append(_first_tokens(llm, prompts, params, samples))
            with_seed = [replace(params, seed=number) for number in range(_seeded(samples))]
            seeded.append(np.stack([_run(llm, list(prompts), one) for one in with_seed]))
    plain, speculative = sides
    places = plain.shape[2]
    limit = MIN_P_VALUE / (places + 1)
    checks = []
    for place in range(places):
        value = _p_value(plain[:, :, place : place + 1], speculative[:, :, place : place + 1])
        checks.append(Check(f"token {place + 1}: p", value, limit, value >= limit))
    value = _p_value(plain, speculative)
    checks.append(Check(f"first {places} tokens: p", value, limit, value >= limit))
    changed = int((seeded[0] != seeded[1]).any(axis=2).sum())
    name = f"seeded outputs of {seeded[0][:, :, 0].size} that differ"
    return [*checks, Check(name, changed, 0, changed == 0)]


def _seeded(samples: int) -> int:
    return max(1, samples // 10)


def _first_tokens(
    llm: Generates, prompts: Sequence[str], params: SamplingParams, samples: int
) -> np.ndarray:
    """[prompts, samples, max_tokens] int64."""
    tokens = _run(llm, [prompt for prompt in prompts for _ in range(samples)], params)
    return tokens.reshape(len(prompts), samples, -1)


def _run(llm: Generates, prompts: list[str], params: SamplingParams) -> np.ndarray:
    """The outputs' tokens [prompts, max_tokens], -1 behind the end of one."""
    assert params.max_tokens is not None
    tokens = np.full((len(prompts), params.max_tokens), -1, np.int64)
    results = llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
    for row, result in zip(tokens, results, strict=True):
        ids = result.outputs[0].token_ids
        row[: len(ids)] = ids
    return tokens


def _p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Of outputs [prompts, samples, places]: prompts are tested apart, and judged together."""
    tests = []
    for one, other in zip(first, second, strict=True):
        _, kind = np.unique(np.concatenate([one, other]), axis=0, return_inverse=True)
        kinds = int(kind.max()) + 1
        counts = [np.bincount(part, minlength=kinds) for part in np.split(kind, [len(one)])]
        tests.append(two_samples(counts[0], counts[1]))
    return together(tests).p_value
