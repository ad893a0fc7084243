"""The real models, packed as served: the perplexity of transformers, and no flip from float32."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.backends import weight_layout
from jaxserve.eval.evaluation import evaluate, read_text, tokenize
from jaxserve.loading.load import load_model
from jaxserve.loading.loaded_model import LoadedModel

TEXT = Path(__file__).resolve().parents[2] / "examples" / "eval_text.txt"
GOLDEN = json.loads(
    (Path(__file__).parent / "perplexity_by_transformers.json").read_text(encoding="utf-8")
)
POSITIONS = 2_000
CONFIG = EngineConfig()

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.as_served]


@contextmanager
def quiet(_what: str, _total: int) -> Iterator[Any]:
    yield lambda more: None


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def packed(request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    # Where the native kernels are not built the reference multiplies the packed rows.
    layout = weight_layout(CONFIG.attention_backend) or "rows"
    return request.param, load_model(request.param, weight_layout=layout)


def test_perplexity_is_that_of_transformers(packed: tuple[str, LoadedModel]) -> None:
    name, model = packed
    golden = GOLDEN["models"][name]
    text = tokenize(GOLDEN["text"], model, None)
    assert (len(text.ids), list(text.prefix)) == (golden["num_tokens"], golden["bos"])
    for want in golden["runs"]:
        settings = {key: want[key] for key in ("context", "stride")}
        got = evaluate(model, CONFIG, text, progress=quiet, **settings)
        assert got["num_scored_tokens"] == want["num_scored_tokens"]
        assert got["perplexity"] == pytest.approx(want["perplexity"], rel=1e-4)
        assert got["bits_per_byte"] == pytest.approx(want["bits_per_byte"], rel=1e-4)


def test_packed_weights_say_what_their_float32_expansion_says(
    packed: tuple[str, LoadedModel],
) -> None:
    name, model = packed
    text = tokenize(read_text(TEXT), model, POSITIONS + (0 if model.tokenizer.adds_bos else 1))
    expanded = load_model(name, dtype="float32")
    report = evaluate(
        model, CONFIG, text, context=512, stride=500, baseline=expanded, progress=quiet
    )
    assert report["num_scored_tokens"] == POSITIONS
    assert report["weight_bytes"] < 0.3 * report["baseline"]["weight_bytes"]
    assert report["num_flips_above_margin"] == 0
    assert report["kl_max"] < 1e-6
    assert report["perplexity"] == pytest.approx(report["baseline"]["perplexity"], rel=1e-5)
