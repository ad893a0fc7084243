"""Comparing a model's outputs with speculation and without, on models that draw from a list."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.eval.output_comparison import compare_outputs
from jaxserve.sampling_params import SamplingParams

TRUTH = np.array([0.5, 0.3, 0.2])


class Drawing:
    """Two tokens each: the first as given, the second the same as the first half of the time."""

    def __init__(self, engine_seed, shares, seeded_by=0):
        self.rng = np.random.default_rng(engine_seed)
        self.shares, self.seeded_by = shares, seeded_by

    def generate(self, prompts, sampling_params, use_tqdm=True):
        assert use_tqdm is False
        results = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            rng = self.rng
            if params.seed is not None:
                rng = np.random.default_rng((params.seed, self.seeded_by, len(prompt)))
            first = int(rng.choice(3, p=self.shares))
            second = first if rng.random() < 0.5 else int(rng.choice(3, p=TRUTH))
            ids = [first] if first == 2 else [first, second]  # 2 ends an output
            results.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]))
        return results


def compare(shares=TRUTH, seeded_by=0):
    @contextmanager
    def make(seed, speculate):
        yield Drawing(seed, shares if speculate else TRUTH, seeded_by if speculate else 0)

    said = []
    params = SamplingParams(max_tokens=2)
    checks = compare_outputs(make, ["a", "bc"], params, samples=500, say=said.append)
    assert said == ["1000 outputs without speculation", "1000 outputs with speculation"]
    assert [check.name for check in checks] == [
        "token 1: p",
        "token 2: p",
        "first 2 tokens: p",
        "seeded outputs of 100 that differ",
    ]
    return checks


def test_the_same_distribution_passes():
    assert all(check.passed for check in compare()), compare()


@pytest.mark.parametrize("shares", [(0.35, 0.45, 0.2), (0.5, 0.2, 0.3)])
def test_another_distribution_is_found(shares):
    first, _, whole, _ = compare(np.array(shares))
    assert not first.passed
    assert not whole.passed


def test_seeded_outputs_that_change_are_found():
    *samples, seeded = compare(seeded_by=1)
    assert all(check.passed for check in samples)
    assert not seeded.passed
    assert 30 < seeded.value < 90
