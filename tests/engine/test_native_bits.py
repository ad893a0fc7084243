"""On the native CPU kernels a row's bits depend on that row alone, end to end.

Design section 7: not close, but `==`, for every logprob of every token, over the shared matrix:
cached and copied pages, host memory, chunking, memory pressure with its preemptions, the loop,
neighbours, buckets and choices.
"""

from functools import cache

import jax
import pytest

from jaxserve.engine.request import Request
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.registry import find_model
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS, VOCAB_SIZE, ByteTokenizer, LineTemplate
from tests.support.matrix import (
    MAX_TOKENS,
    PLAIN,
    MatrixEngines,
    Setting,
    covering,
    matrix_requests,
    said,
)
from tests.support.tiny_engine import MAX_MODEL_LEN, Run, drive, tiny_config, tiny_engine

pytestmark = pytest.mark.as_served

KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=5),
    "sampled": SamplingParams(
        temperature=0.8,
        top_p=0.9,
        seed=7,
        frequency_penalty=0.6,
        repetition_penalty=1.1,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=5,
    ),
}
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
            "sliding_window_pattern": 2,
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
def engines(name: str) -> MatrixEngines:
    return MatrixEngines(packed_model(name), attention_backend="cpu")


def requests(kind: str, n: int) -> list[Request]:
    return matrix_requests(KINDS[kind], n)


@cache
def expected(name: str, kind: str, n: int) -> Run:
    return engines(name).run(PLAIN[n], KINDS[kind])


def check(name: str, kind: str, setting: Setting) -> None:
    alone = expected(name, kind, setting.n)
    got = engines(name).run(setting, KINDS[kind])
    assert got.tokens == alone.tokens
    assert said(got) == said(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-f32", "gemma3-f32"])
@pytest.mark.parametrize("setting", covering(3), ids=lambda s: s.name)
def test_every_logprob_is_the_same_number(setting: Setting, name: str) -> None:
    check(name, "greedy", setting)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-int4", "qwen3-int8"])
@pytest.mark.parametrize("setting", covering(2), ids=lambda s: s.name)
def test_every_logprob_of_packed_weights_is_the_same_number(setting: Setting, name: str) -> None:
    check(name, "greedy", setting)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", covering(2), ids=lambda s: s.name)
def test_sampled_numbers_are_the_same_too(setting: Setting, name: str) -> None:
    check(name, "sampled", setting)


def test_windows_have_tables_of_their_own() -> None:
    assert engines("gemma3-f32").engine(PLAIN[1]).kv_manager.windows == (24, None)


def test_the_numbers_would_show_a_difference() -> None:
    """Other weights, other numbers: what `==` is said about is not constant."""
    name = "llama-f32"
    model = packed_model(name)
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["final_norm"] = params["final_norm"] * 1.0000001
    other = LoadedModel(**{**vars(model), "params": params})
    got = drive(tiny_engine(other, attention_backend="cpu"), requests("greedy", 1))
    assert said(got) != said(expected(name, "greedy", 1))
