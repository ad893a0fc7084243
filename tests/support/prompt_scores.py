"""Engines and requests of the tests of prompt logprobs, and what is true of every result."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import PromptLogprobs, Request
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    SMALL,
    Run,
    drive,
    random_prompts,
    request,
    tiny_engine,
    tiny_model,
)

PAGE: int = SMALL["page_size"]
ASKS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
SILENT = replace(ASKS, prompt_logprobs=None)
SIZES = {"hidden_size": 64, "intermediate_size": 96}
WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MODELS = {"llama": SIZES, "gemma3": {**SIZES, **WINDOWED}}
PROMPTS = random_prompts(5, (2, 60), seed=3)


@cache
def model(name: str) -> LoadedModel:
    """Its matrices lie as the native kernels want them: otherwise XLA would multiply."""
    loaded = tiny_model(**MODELS[name])
    params = random_params(loaded.model, loaded.config, 0, "float32", "panels")
    return replace(loaded, params=params)


@cache
def programs(name: str, backend: str) -> SharedPrograms:
    return SharedPrograms()


def new_engine(name: str = "llama", backend: str = "cpu", **settings: object) -> Engine:
    return tiny_engine(
        model(name), loader=programs(name, backend), attention_backend=backend, **settings
    )


@cache
def engine(
    name: str = "llama",
    backend: str = "cpu",
    chunk: int | None = None,
    prefix_cache: bool = True,
) -> Engine:
    return new_engine(name, backend, max_chunk=chunk, prefix_cache=prefix_cache)


def asking(prompts: Sequence[Sequence[int]] = PROMPTS, **changes: object) -> list[Request]:
    params = replace(ASKS, **changes)
    return [request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


def found(run: Run) -> dict[str, PromptLogprobs]:
    """What came, once for each request and with its first token."""
    first: dict[str, PromptLogprobs] = {}
    seen: set[str] = set()
    for event in run.events:
        name = event.request_id
        if event.prompt_logprobs is not None:
            assert name not in seen, "it comes with the first token and only once"
            assert event.token_ids
            first[name] = event.prompt_logprobs
        seen.add(name)
    return first


def numbers(got: PromptLogprobs) -> list[list]:
    fields = (got.token_ids, got.logprobs, got.ranks, got.top_ids, got.top_logprobs)
    return [field.tolist() for field in fields]


def check_shape(prompt: Sequence[int], got: PromptLogprobs, num_top: int) -> None:
    """One entry for each token but the first, the token itself in it, ranks and tops fitting."""
    assert got.token_ids.tolist() == list(prompt[1:])
    assert got.top_ids.shape == got.top_logprobs.shape == (len(prompt) - 1, num_top)
    assert (got.logprobs <= 0).all()
    assert (got.ranks >= 1).all()
    for i, rank in enumerate(got.ranks):
        if rank <= num_top:
            assert got.top_ids[i, rank - 1] == got.token_ids[i]
            assert got.top_logprobs[i, rank - 1] == got.logprobs[i]


@cache
def plain(name: str, backend: str) -> list[list[list]]:
    """The numbers of every prompt, run alone, whole and without a cache."""
    run = drive(engine(name, backend, prefix_cache=False), asking(), together=False)
    return [numbers(found(run)[str(i)]) for i in range(len(PROMPTS))]
