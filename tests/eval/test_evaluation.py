"""Tiny models, evaluated: against whole-prompt logits, themselves, and copies with noise."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.eval import position_scores
from jaxserve.eval.evaluation import (
    context_and_stride,
    evaluate,
    read_text,
    score_windows,
    tokenize,
)
from jaxserve.eval.teacher_forcing import TeacherForced
from jaxserve.eval.text_windows import text_windows
from jaxserve.loading.loaded_model import LoadedModel
from tests.support.byte_model import BOS, VOCAB_SIZE, ByteTokenizer
from tests.support.paged_model import PagedModel
from tests.support.tiny_engine import tiny_model

TEXT = "Two records are better than one only when they are made by different hands. Wärme! " * 2
MODEL = tiny_model(scale=3.0)
SMALL = EngineConfig(max_batch_tokens=16, page_size=4)


@contextmanager
def quiet(_what: str, _total: int):
    yield lambda more: None


def run(model: LoadedModel, config: EngineConfig = SMALL, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"context": 64, "stride": 32, "progress": quiet, **options}
    text = tokenize(TEXT, model, settings.pop("max_tokens", None))
    return evaluate(model, config, text, **settings)


def with_noise(model: LoadedModel, size: float) -> LoadedModel:
    """Every matrix moved by normal noise of `size` times its own deviation."""
    rng = np.random.default_rng(5)

    def move(leaf: Any) -> Any:
        noise = rng.normal(0, size * float(np.std(leaf)), leaf.shape)
        return leaf + noise.astype(np.float32) if leaf.ndim == 2 else leaf

    return replace(model, params=jax.tree.map(move, model.params))


def test_scores_are_those_of_whole_prompts():
    text = tokenize(TEXT, MODEL, None)
    windows = text_windows(text.ids, text.prefix, context=50, stride=20)
    served = TeacherForced(MODEL, SMALL, 50)
    got = score_windows(served, None, windows, lambda more: None).served
    want, best = [], []
    for window in windows:
        whole = PagedModel(MODEL.model, MODEL.config, MODEL.params)
        logits = whole.whole(window.token_ids)[window.first - 1 : -1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        targets = np.array(window.token_ids[window.first :])
        want += logprobs[np.arange(len(targets)), targets].tolist()
        best += logits.argmax(1).tolist()
    np.testing.assert_allclose(got.logprob, want, atol=2e-5)
    assert got.best.tolist() == best


def test_the_report_adds_up():
    progress: list[int] = []

    @contextmanager
    def watched(what: str, total: int):
        progress.append(total)
        yield lambda more: progress.append(-more)

    report = run(MODEL, progress=watched)
    num_bytes = len(TEXT.encode())
    assert (report["num_scored_tokens"], report["num_scored_bytes"]) == (num_bytes, num_bytes)
    nats = report["nats_per_token"]
    assert report["perplexity"] == pytest.approx(np.exp(nats))
    assert report["bits_per_byte"] == pytest.approx(nats / np.log(2)), "a token is a byte here"
    assert report["weight_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(MODEL.params))
    assert "kl_mean" not in report
    assert progress[0] == num_bytes
    assert sum(progress) == 0, "all progress was reported"


def test_without_a_bos_the_first_token_is_not_scored():
    plain = replace(MODEL, tokenizer=ByteTokenizer(add_bos=False))
    report = run(plain)
    assert report["num_scored_tokens"] == report["num_scored_bytes"] == len(TEXT.encode()) - 1


@pytest.mark.parametrize(("chunk", "page_size"), [(17, 4), (40, 16), (512, 4)])
def test_chunks_and_pages_change_nothing(chunk: int, page_size: int):
    other = run(MODEL, EngineConfig(max_batch_tokens=chunk, page_size=page_size))
    assert other["nats_per_token"] == pytest.approx(run(MODEL)["nats_per_token"], abs=2e-6)


def test_small_pieces_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch):
    noisy = with_noise(MODEL, 0.1)
    want = run(noisy, baseline=MODEL)
    monkeypatch.setattr(position_scores, "MAX_LOGITS_BYTES", 4 * 2 * VOCAB_SIZE * 5)
    got = run(noisy, baseline=MODEL)
    assert got["num_flips"] == want["num_flips"]
    for key in ("nats_per_token", "kl_mean", "kl_max"):
        assert got[key] == pytest.approx(want[key], abs=5e-6)


def test_a_model_against_itself():
    reference = replace(SMALL, attention_backend="reference")
    report = run(MODEL, reference, baseline=MODEL)
    assert (report["kl_mean"], report["kl_max"]) == (0, 0)
    assert (report["top1_agreement"], report["num_flips"]) == (1, 0)
    assert report["largest_flipped_margin"] is None
    assert report["baseline"]["perplexity"] == report["perplexity"]


def test_more_noise_in_the_weights_costs_more():
    reports = [run(with_noise(MODEL, size), baseline=MODEL) for size in (0.01, 0.1, 0.5)]
    kl = [report["kl_mean"] for report in reports]
    assert 0 < kl[0] < kl[1] < kl[2]
    assert reports[0]["top1_agreement"] > reports[2]["top1_agreement"]
    for report in reports:
        assert report["kl_mean"] <= report["kl_p99"] <= report["kl_max"]
    noisiest = reports[2]
    assert noisiest["num_flips"] >= noisiest["num_flips_above_margin"] > 5
    assert noisiest["largest_flipped_margin"] > 1e-3
    flipped = noisiest["num_flips"] / noisiest["num_scored_tokens"]
    assert noisiest["top1_agreement"] == pytest.approx(1 - flipped)


def test_max_tokens_scores_the_beginning():
    report = run(MODEL, max_tokens=40)
    assert report["num_scored_tokens"] == 40
    assert report["num_scored_bytes"] == 40


def test_weights_that_are_not_numbers_are_told():
    broken = replace(MODEL, params=jax.tree.map(lambda leaf: leaf * np.nan, MODEL.params))
    with pytest.raises(ModelLoadError, match="tiny: got nan at scored token 0, and at"):
        run(broken, baseline=MODEL)


def test_models_with_other_tokens_cannot_be_compared():
    other = replace(MODEL, name="other", tokenizer=ByteTokenizer(add_bos=False))
    with pytest.raises(InvalidRequestError, match="other splits the text into other tokens"):
        run(MODEL, baseline=other)


def test_a_bos_in_the_text_itself_counts_once():
    text = tokenize("<s>abc", MODEL, None)
    assert (text.prefix, text.ids) == ((BOS,), (97, 98, 99))


def test_tokens_past_the_vocabulary_are_refused():
    with pytest.raises(InvalidRequestError, match=r"token 116, .* ends at 99"):
        tokenize("ct", replace(MODEL, vocab_size=100), None)


def test_context_and_stride():
    assert context_and_stride(MODEL, None, None) == (256, 128)
    assert context_and_stride(replace(MODEL, max_model_len=9000), None, None) == (1024, 512)
    assert context_and_stride(MODEL, 100, None) == (100, 50)
    assert context_and_stride(MODEL, 100, 7) == (100, 7)
    with pytest.raises(InvalidRequestError, match="holds at most 256 tokens"):
        context_and_stride(MODEL, 257, None)


def test_texts_that_cannot_be_read(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "t.txt"
    with pytest.raises(InvalidRequestError, match=r"cannot read .*t\.txt: No such file"):
        read_text(path)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_text(tmp_path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(InvalidRequestError, match="not UTF-8 text \\(byte 2\\)"):
        read_text(path)
    path.write_text(" \n")
    with pytest.raises(InvalidRequestError, match="is empty"):
        read_text(path)
    path.write_text("long enough")
    assert read_text(path) == "long enough"
    monkeypatch.setattr("jaxserve.eval.evaluation.MAX_TEXT_BYTES", 5)
    with pytest.raises(InvalidRequestError, match="11 bytes; evaluate at most 5"):
        read_text(path)
