"""The GPU kernels, interpreted on a CPU, under a whole model and under the engine.

What each kernel computes is tested in tests/pallas_kernels; here it is what is handed to them: a
stacked pool, page tables, mixed steps, steps that verify drafts, packed weights. The oracle is the
reference on the same numbers, so what differs is rounding to bfloat16 in other places.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.kv_pool import StackedPool
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from tests.support.matrix import said
from tests.support.paged_model import PagedModel, PagedSequence
from tests.support.tiny_engine import Run, drive, request, tiny_engine, tiny_model

# NaN that nobody may see goes through products, of which the interpreter warns.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
PAGE_SIZE = 16
SMALL = {"max_batch_rows": 2, "max_batch_tokens": 16, "num_pages": 12, "max_model_len": 64}
KV_TYPES = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
CLOSE = 0.03  # of the largest logit; int8 and fp8 are rounded alike on both sides


@cache
def model_of(quantization: str | None = None, layout: str | None = None) -> LoadedModel:
    """Two layers, two query heads on one KV head of 64, so that a step is a few thread blocks."""
    tiny = tiny_model(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, scale=1.0,
    )  # fmt: skip
    params = random_params(tiny.model, tiny.config, 0, "bfloat16", layout, quantization)
    grown = jax.tree.map(lambda x: x * 8 if x.ndim == 2 and x.dtype == jnp.bfloat16 else x, params)
    return LoadedModel(**{**vars(tiny), "params": grown})


def paged(backend: str, kv: str, width: int = 1, **how: str) -> PagedModel:
    model = model_of(**how)
    return PagedModel(
        model.model, model.config, model.params, num_pages=12, page_size=PAGE_SIZE,
        pages_per_row=4, backend=backend, kv_dtype=KV_TYPES[kv], width=width,
    )  # fmt: skip


def logits_of(run: PagedModel) -> list[np.ndarray]:
    """A prompt; the rest of it beside another row's decode step and padding; drafts."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 60).tolist()
    one, other = PagedSequence([7, 3, 9]), PagedSequence([5, 2])
    out = run.step(prefill=[(one, tokens[:15])])
    out += run.step(prefill=[(other, tokens[20:25])])
    out += run.step(
        decode=[None, (other, tokens[25])], prefill=[(one, tokens[15:20])], pad_tokens=3
    )
    out += run.step(decode=[(other, tokens[26 : 26 + run.width]), (one, tokens[40])])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "width"), [("bf16", 1), ("int8", 1), ("fp8", 1), ("bf16", 3)])
def test_a_models_steps_are_those_of_the_reference(kv: str, width: int) -> None:
    """Every slot that nobody wrote holds NaN."""
    got, want = (logits_of(paged(name, kv, width)) for name in ("interpret", "reference"))
    assert isinstance(paged("interpret", kv).pool, StackedPool)
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() < CLOSE * np.abs(b).max()
        assert np.abs(b).max() > 1


@pytest.mark.slow
def test_b34_a_row_of_nan_moves_no_bit_of_its_neighbours() -> None:
    """One row's keys and values are NaN; the other row, in the same steps, says the same."""
    said_by = []
    for poison in (False, True):
        run = paged("interpret", "bf16")
        good, bad = PagedSequence([7, 3]), PagedSequence([5, 2])
        run.step(prefill=[(good, [1, 2, 3, 4])])
        run.step(prefill=[(bad, [5, 6, 7, 8])])
        if poison:
            run.pool = jax.tree.map(lambda pages: pages.at[:, 5].set(jnp.nan), run.pool)
        said_by.append(run.step(decode=[(bad, 9), (good, 5)], prefill=[]))
    (_, want), (nothing, got) = said_by
    np.testing.assert_array_equal(got, want)
    assert np.isnan(nothing).any()


@pytest.mark.slow
def test_b54_padding_reaches_nobody() -> None:
    """More padded rows and tokens, whatever they carry: the same logits, and every page that the
    step does not write to keeps its bits."""
    runs = []
    for padding in ({}, {"pad_rows": 1, "pad_tokens": 3, "junk": 11}):
        run = paged("interpret", "bf16")
        one, other = PagedSequence([7, 3]), PagedSequence([5, 2])
        run.step(prefill=[(one, [1, 2, 3, 4])])
        logits = run.step(decode=[(one, 5)], prefill=[(other, [6, 7, 8])], **padding)
        pool = [np.asarray(leaf).view(np.uint16) for leaf in jax.tree.leaves(run.pool)]
        runs.append((logits, pool))
    (want, before), (got, after) = runs
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() < 0.02 * np.abs(b).max()  # products round by their shape
    for a, b in zip(after, before, strict=True):
        untouched = np.ones(a.shape[1], bool)
        untouched[[7, 5]] = False
        np.testing.assert_array_equal(a[:, untouched], b[:, untouched])


def greedy(backend: str, **settings: object) -> Run:
    engine = tiny_engine(
        model_of(), attention_backend=backend, dtype="bfloat16", page_size=PAGE_SIZE,
        **{**SMALL, **settings},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    prompts = [list(b"a prompt over two pages"), list(b"short")]
    requests = [request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    return drive(engine, requests, interpreted=backend == "interpret")


@pytest.mark.slow
def test_an_engine_says_what_the_reference_says() -> None:
    """Up to where the two best tokens are closer than the logprobs are."""
    got, want = greedy("interpret"), greedy("reference")
    assert got.errors == want.errors == {}
    compared = 0
    for name, tokens in said(want).items():
        for mine, theirs in zip(said(got)[name], tokens, strict=True):
            assert abs(mine[0] - theirs[0]) < 0.06
            (first, best), (_, second) = theirs[1][:2]
            if best - second < 0.12:
                break
            assert mine[1][0][0] == first
            compared += 1
    assert compared >= 4
