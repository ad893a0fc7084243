"""Scores a text: window by window, chunk by chunk, one model or two side by side."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.eval.position_scores import compare_piece, piece_rows, pieces, score_piece
from jaxserve.eval.summary import TextScores, summarize
from jaxserve.eval.teacher_forcing import Chunk, TeacherForced
from jaxserve.eval.text_windows import Window, text_windows
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.loading.tokenizer import Tokenizer

MAX_TEXT_BYTES = 64 << 20
DEFAULT_CONTEXT = 1024

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class EvalText:
    """A text as tokens. prefix: what the tokenizer puts in front of a text."""

    text: str
    ids: tuple[int, ...]
    prefix: tuple[int, ...]


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises InvalidRequestError if it is missing, empty, too large or not text."""
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{path} has {size} bytes; evaluate at most {MAX_TEXT_BYTES}", "text"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}", "text") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first", "text"
        ) from None
    if not text.strip():
        raise InvalidRequestError(f"{path} is empty; give a text of some hundred words", "text")
    return text


def tokenize(text: str, model: LoadedModel, max_tokens: int | None) -> EvalText:
    """The first max_tokens tokens of a text (None: all of it).

    Raises InvalidRequestError if the model has no logits for one of them.
    """
    tokenizer: Tokenizer = model.tokenizer
    bos = tokenizer.bos_token_id
    prefix = (bos,) if tokenizer.adds_bos and bos is not None else ()
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if prefix and ids[:1] == prefix:  # written in the text itself
        ids = ids[1:]
    ids = ids[:max_tokens]
    if ids and max(ids) >= model.vocab_size:
        raise InvalidRequestError(
            f"the text has token {max(ids)}, the model's vocabulary ends at {model.vocab_size - 1}"
        )
    return EvalText(text, ids, prefix)


def context_and_stride(
    model: LoadedModel, context: int | None, stride: int | None
) -> tuple[int, int]:
    """What was asked for, or DEFAULT_CONTEXT (less if the model holds less) and half of that."""
    limit = model.max_model_len
    if context is not None and context > limit:
        raise InvalidRequestError(
            f"context is {context}; this model holds at most {limit} tokens", "context"
        )
    context = min(DEFAULT_CONTEXT, limit) if context is None else context
    return context, max(1, context // 2) if stride is None else stride


def evaluate(
    model: LoadedModel,
    config: EngineConfig,
    text: EvalText,
    *,
    context: int,
    stride: int,
    baseline: LoadedModel | None = None,
    progress: ProgressBar,
) -> dict[str, Any]:
    """The report of a text: see `summary.summarize` for its fields.

    config: how `model` is served. baseline: a float32 run of it, or another model with the same
    tokens; it runs on the reference backend in float32.

    Raises InvalidRequestError for what cannot be scored, ModelLoadError if logits are NaN.
    """
    windows = text_windows(text.ids, text.prefix, context=context, stride=stride)
    served = TeacherForced(model, config, context)
    other = None if baseline is None else _baseline(baseline, config, text, context)
    total = sum(window.num_scored for window in windows)
    with progress("tokens", total) as advance:
        scores = score_windows(served, other, windows, advance)
    _check_numbers(scores.served.logprob, model.name)
    if scores.baseline is not None and scores.kl is not None:
        _check_numbers(scores.baseline.logprob, "the baseline")
        _check_numbers(scores.kl, "KL divergence")
    num_bytes = _scored_bytes(model.tokenizer, text.ids, total)
    report: dict[str, Any] = {"context": context, "stride": stride, "num_windows": len(windows)}
    report |= summarize(scores, num_bytes)
    report |= {"served": served.describe(), "weight_bytes": _weight_bytes(model)}
    if baseline is not None:
        report["baseline"]["weight_bytes"] = _weight_bytes(baseline)
    return report


def score_windows(
    served: TeacherForced,
    baseline: TeacherForced | None,
    windows: Sequence[Window],
    advance: Callable[[int], None],
) -> TextScores:
    """Every scored token of the windows, in the text's order. advance: is told how many are new."""
    found: list[Any] = []
    for window in windows:
        inputs = window.token_ids[:-1]
        runs = [served.run(inputs)] + ([] if baseline is None else [baseline.run(inputs)])
        for chunks in zip(*runs, strict=True):
            for scores, count in _score_chunk(served, baseline, window, chunks):
                found.append(scores)
                advance(count)
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
    return TextScores(whole) if baseline is None else TextScores(*whole)


def _score_chunk(
    served: TeacherForced,
    baseline: TeacherForced | None,
    window: Window,
    chunks: tuple[Chunk, ...],
) -> Iterator[tuple[Any, int]]:
    """(what a piece says, of how many tokens). A token's hidden state scores the token after it."""
    start, length = chunks[0].start, chunks[0].length
    total = chunks[0].hidden.shape[0]
    following = np.zeros(total, np.int32)
    following[:length] = window.token_ids[start + 1 : start + 1 + length]
    models = [served] if baseline is None else [served, baseline]
    rows = piece_rows(total, sum(model.head.config.vocab_size for model in models))
    first = max(window.first - 1 - start, 0)
    for at, wanted in pieces(first, length - first, rows, total):
        start_and_targets = np.array([at, *following[at : at + rows]], np.int32)
        sides: list[Any] = []
        for model, chunk in zip(models, chunks, strict=True):
            sides += [model.head, model.params, chunk.hidden]
        score = score_piece if baseline is None else compare_piece
        # Fetched at once: a piece must not run beside the next one, both with their logits.
        result = jax.device_get(score(*sides, start_and_targets, rows))
        kept = jax.tree.map(lambda leaf, wanted=wanted: leaf[wanted], result)
        yield kept, wanted.stop - wanted.start


def _baseline(
    baseline: LoadedModel, config: EngineConfig, text: EvalText, context: int
) -> TeacherForced:
    ids = tokenize(text.text, baseline, len(text.ids))
    if (ids.ids, ids.prefix) != (text.ids, text.prefix):
        raise InvalidRequestError(
            f"{baseline.name} splits the text into other tokens; compare models that share a "
            "tokenizer",
            "against",
        )
    plain = replace(config, dtype="float32", attention_backend="reference", kv_cache_dtype="auto")
    return TeacherForced(baseline, plain, context)


def _check_numbers(values: Any, whose: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ModelLoadError(
            f"{whose}: got {values[bad[0]]} at scored token {bad[0]}, and at {bad.size - 1} more; "
            "want finite numbers: the weights are damaged, or a type overflows"
        )


def _scored_bytes(tokenizer: Tokenizer, ids: tuple[int, ...], num_scored: int) -> int:
    """Bytes of text that the last num_scored tokens spell."""

    def num_bytes(part: tuple[int, ...]) -> int:
        return len(tokenizer.decode(part, skip_special_tokens=False).encode())

    return num_bytes(ids) - num_bytes(ids[: len(ids) - num_scored])


def _weight_bytes(model: LoadedModel) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
