"""On the native CPU kernels a row's bits depend on that row alone, end to end.

Design section 7: not close, but `==`, for every logprob of every token, over the whole shared
matrix: chunking, memory pressure with its preemptions, neighbours, buckets and choices.
"""

from functools import cache

import jax
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.registry import find_model
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS, VOCAB_SIZE, ByteTokenizer, LineTemplate
from tests.support.matrix import Setting, settings
from tests.support.tiny_engine import (
    AMPLE,
    MAX_MODEL_LEN,
    TIGHT,
    Run,
    drive,
    random_prompts,
    request,
    tiny_config,
    tiny_engine,
)

KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5),
    "sampled": SamplingParams(
        temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True, logprobs=5
    ),
}
PROMPTS = random_prompts(4, (1, 60))
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # groups of 32 divide them
MODELS = {
    "llama-f32": (SIZES, None),
    "llama-int4": (SIZES, "int4"),
    "qwen3-int8": ({**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 24}, "int8"),
    "gemma3-f32": (
        {
            **SIZES,
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        None,
    ),
}


@cache
def packed_model(name: str) -> LoadedModel:
    overrides, quantization = MODELS[name]
    hf = tiny_config(**overrides)
    model = find_model(hf["architectures"][0])
    config = model.config_from_hf(hf)
    params = random_params(model, config, 0, "float32", "panels", quantization)
    return LoadedModel(
        name="tiny",
        model=model,
        config=config,
        params=params,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat_template=LineTemplate(),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )


@cache
def engine(name: str, pages: int, chunk: int | None) -> Engine:
    return tiny_engine(
        packed_model(name), num_pages=pages, max_chunk=chunk, attention_backend="cpu"
    )


def requests(kind: str, n: int) -> list[Request]:
    return [
        request(f"{i}-{choice}", prompt, KINDS[kind], choice=choice)
        for i, prompt in enumerate(PROMPTS)
        for choice in range(n)
    ]


def said(run: Run) -> dict[str, list]:
    """Every token of every request with all its logprobs, as they came."""
    said: dict[str, list] = {}
    for event in run.events:
        said.setdefault(event.request_id, []).extend(
            (lp.logprob, lp.top) for lp in event.logprobs or ()
        )
    return said


@cache
def expected(name: str, kind: str, n: int) -> tuple[Run, dict[str, list]]:
    """Each request alone, whole prompts, ample pool."""
    run = drive(engine(name, AMPLE, None), requests(kind, n), together=False)
    return run, said(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", settings(), ids=lambda s: s.name)
def test_every_logprob_is_the_same_number(setting: Setting, name: str) -> None:
    alone, numbers = expected(name, "greedy", setting.n)
    pages = TIGHT if setting.tight_pool else AMPLE
    got = drive(
        engine(name, pages, setting.chunk), requests("greedy", setting.n), together=setting.batched
    )
    assert got.tokens == alone.tokens
    assert said(got) == numbers
    if setting.tight_pool and setting.batched:
        assert got.preemptions > 0, "the tight pool should have made somebody wait"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sampled_numbers_are_the_same_too(name: str) -> None:
    alone, numbers = expected(name, "sampled", 4)
    got = drive(engine(name, TIGHT, 7), requests("sampled", 4))
    assert got.tokens == alone.tokens
    assert said(got) == numbers


def test_the_numbers_would_show_a_difference() -> None:
    """Other weights, other numbers: what `==` is said about is not constant."""
    name = "llama-f32"
    _, numbers = expected(name, "greedy", 1)
    model = packed_model(name)
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["final_norm"] = params["final_norm"] * 1.0000001
    other = LoadedModel(**{**vars(model), "params": params})
    got = drive(tiny_engine(other, attention_backend="cpu"), requests("greedy", 1))
    assert said(got) != numbers
