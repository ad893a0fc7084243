"""Verify drafts on hand-made batches, and draw the same tokens one by one with `sample`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.core.step_batch import SamplingState, StepOutput
from jaxserve.sampling import make_state, verify
from tests.support.sampling_runs import SLOTS, batch_of, run

_compiled = jax.jit(verify, static_argnames="vocab_size")

PADDING = 24

# Logits [V] that follow a row's new tokens: a model, as far as sampling is concerned.
Model = Callable[[int, tuple[int, ...]], np.ndarray]


def table_model(vocab: int, seed: int = 0, scale: float = 3.0) -> Model:
    """Logits that depend on the row and its last two new tokens."""

    def logits(row: int, tokens: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng((seed, row, *tokens[-2:]))
        return (rng.normal(size=vocab) * scale).astype(np.float32)

    return logits


def padded_drafts(drafts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """[R, width - 1] int32, filled up with -1."""
    array = np.full((len(drafts), width - 1), -1, np.int32)
    for row, tokens in enumerate(drafts):
        array[row, : len(tokens)] = tokens
    return array


def logits_behind(model: Model, drafts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """[R, width, V]; NaN behind a row's drafts, where nobody may look."""
    vocab = len(model(0, ()))
    logits = np.full((len(drafts), width, vocab), np.nan, np.float32)
    for row, tokens in enumerate(drafts):
        for place in range(len(tokens) + 1):
            logits[row, place] = model(row, tuple(tokens[:place]))
    return logits


def run_verify(
    drafts: Any,
    logits: Any,
    *rows: dict[str, Any],
    draft_probs: Any = None,
    coupled: Any = None,
    state: SamplingState | None = None,
) -> tuple[StepOutput, SamplingState]:
    """Verify once: drafts [R, W - 1], logits [R, W, V]; results as numpy.

    The logits are padded with high ones: padding takes part in nothing (b38).
    """
    logits = np.asarray(logits, np.float32)
    vocab = logits.shape[2]
    logits = np.pad(logits, ((0, 0), (0, 0), (0, PADDING)), constant_values=50.0)
    results = _compiled(
        np.asarray(drafts, np.int32),
        draft_probs,
        logits,
        batch_of(*rows, width=logits.shape[1]),
        state or make_state(SLOTS, vocab),
        vocab_size=vocab,
        coupled=coupled,
    )
    return jax.tree.map(np.asarray, results)


def one_by_one(
    model: Model,
    steps: Sequence[int],
    *rows: dict[str, Any],
    state: SamplingState,
) -> tuple[list[list[int]], list[list[Any]], SamplingState]:
    """steps[r] tokens of row r from `sample`, one step each; their logprobs; the state after."""
    tokens: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[Any]] = [[] for _ in rows]
    for step in range(max(steps)):
        settings = [
            {**row, "position": row.get("position", 0) + step, "active": step < count}
            for row, count in zip(rows, steps, strict=True)
        ]
        logits = np.stack([model(row, tuple(drawn)) for row, drawn in enumerate(tokens)])
        output, state = run(logits, *settings, state=state, bucket=len(rows))
        assert output.ok.all()
        for row, count in enumerate(steps):
            if step < count:
                tokens[row].append(int(output.tokens[row, 0]))
                logprobs[row].append(jax.tree.map(lambda leaf, r=row: leaf[r, 0], output.logprobs))
    return tokens, logprobs, state
