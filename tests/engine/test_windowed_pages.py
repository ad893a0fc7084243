"""A model of windowed and global layers through the engine: same bits, fewer pages."""

from functools import cache

import pytest

from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.registry import find_model
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_native_bits import MODELS, requests
from tests.support.byte_model import EOS, VOCAB_SIZE, ByteTokenizer, LineTemplate
from tests.support.matrix import said
from tests.support.tiny_engine import (
    MAX_MODEL_LEN,
    collect_stats,
    drive,
    random_prompts,
    request,
    tiny_config,
    tiny_engine,
)

pytestmark = pytest.mark.as_served

WINDOW = 16
PATTERN = {"sliding_window": WINDOW, "num_hidden_layers": 3, "sliding_window_pattern": 3}
CHUNK = 7


@cache
def model() -> LoadedModel:
    hf = tiny_config(**(MODELS["gemma3-f32"][0] | PATTERN))
    family = find_model(hf["architectures"][0])
    config = family.config_from_hf(hf)
    return LoadedModel(
        name="tiny",
        model=family,
        config=config,
        params=random_params(family, config, 0, "float32", "panels", None),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat_template=LineTemplate(),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )


def test_the_bits_of_a_row_are_its_own() -> None:
    options = {"attention_backend": "cpu", "prefix_cache": False}
    ample = tiny_engine(model(), num_pages=400, **options)
    assert ample.shape.num_groups == 3
    alone = drive(ample, requests("greedy", 1), together=False)
    tight = tiny_engine(model(), num_pages=40, max_chunk=CHUNK, **options)
    stats = collect_stats(tight)
    together = drive(tight, requests("greedy", 1))
    assert together.tokens == alone.tokens
    assert said(together) == said(alone)
    assert any(step.num_running and step.num_waiting for step in stats), "pages were not short"


def test_a_long_request_holds_no_more_than_its_windows() -> None:
    engine = tiny_engine(model(), num_pages=400, max_chunk=CHUNK, prefix_cache=False)
    stats = collect_stats(engine)
    params = SamplingParams(temperature=0, max_tokens=27, ignore_eos=True)
    (prompt,) = random_prompts(1, (100, 100))
    drive(engine, [request("long", prompt, params)])
    most = max(step.pages_used for step in stats)
    pages = -(-(len(prompt) + 26) // engine.page_size)
    in_window = -(-(WINDOW - 1 + 2 * CHUNK - 1) // engine.page_size) + 1
    assert pages < most <= pages + 2 * in_window < 2 * pages
