"""Run the sampler on hand-made batches: every setting neutral unless a row names it."""

from typing import Any

import jax
import numpy as np

from jaxserve.core.step_batch import MAX_SUPPRESS_IDS, SamplingBatch, SamplingState, StepOutput
from jaxserve.sampling import make_state, sample
from jaxserve.sampling_params import MAX_LOGIT_BIAS

NEUTRAL: dict[str, tuple[Any, type]] = {
    "active": (True, np.bool_),
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "suppress_until": (0, np.int32),
    "choice": (0, np.int32),
    "slot": (0, np.int32),
    "num_logprobs": (-1, np.int32),
}

SLOTS = 6
TOY = 40  # vocabulary of tests that need only a few tokens

_compiled = jax.jit(sample, static_argnames="vocab_size")


def batch_of(*rows: dict[str, Any], width: int = 1) -> SamplingBatch:
    """A SamplingBatch with one row for each dict of settings.

    `bias` is a dict, `suppress` a list of ids, `seed` an int, `position` that of the first of
    `width` positions.
    """
    count = len(rows)
    bias_ids = np.full((count, MAX_LOGIT_BIAS), -1, np.int32)
    bias_values = np.zeros((count, MAX_LOGIT_BIAS), np.float32)
    suppress_ids = np.full((count, MAX_SUPPRESS_IDS), -1, np.int32)
    seed = np.zeros((count, 2), np.uint32)
    positions = np.zeros((count, width), np.int32)
    for row, settings in enumerate(rows):
        known = NEUTRAL.keys() | {"bias", "suppress", "seed", "position"}
        assert settings.keys() <= known, settings.keys() - known
        bias = settings.get("bias", {})
        bias_ids[row, : len(bias)] = list(bias)
        bias_values[row, : len(bias)] = list(bias.values())
        suppressed = settings.get("suppress", [])
        suppress_ids[row, : len(suppressed)] = suppressed
        whole = settings.get("seed", 0)
        seed[row] = whole & 0xFFFFFFFF, whole >> 32 & 0xFFFFFFFF
        positions[row] = settings.get("position", 0) + np.arange(width)
    return SamplingBatch(
        bias_ids=bias_ids,
        bias_values=bias_values,
        suppress_ids=suppress_ids,
        seed=seed,
        positions=positions,
        **{
            name: np.array([row.get(name, neutral) for row in rows], dtype)
            for name, (neutral, dtype) in NEUTRAL.items()
        },
    )


def run(
    logits: Any,
    *rows: dict[str, Any],
    state: SamplingState | None = None,
    vocab_size: int | None = None,
    bucket: int = 4,
) -> tuple[StepOutput, SamplingState]:
    """Sample once. logits [R, V], [R, W, V], or [V] for all rows; results as numpy.

    Rows are filled up to `bucket` with idle ones, so that tests share compiled programs.
    """
    logits = np.asarray(logits, np.float32)
    if logits.ndim == 1:
        logits = np.tile(logits, (len(rows), 1))
    if logits.ndim == 2:
        logits = logits[:, None, :]
    count, width, columns = logits.shape
    assert count == len(rows) <= bucket
    padded = np.zeros((bucket, width, columns), np.float32)
    padded[:count] = logits
    idle = [{"active": False}] * (bucket - count)
    vocab = vocab_size or columns
    state = state or make_state(SLOTS, vocab)
    batch = batch_of(*rows, *idle, width=width)
    output, state = _compiled(padded, batch, state, vocab_size=vocab)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], output), jax.tree.map(
        np.asarray, state
    )


def wide(*head: float, rest: float = -1e9) -> np.ndarray:
    """Logits [TOY] that start with `head`; the others are out of reach."""
    return np.concatenate([head, np.full(TOY - len(head), rest)]).astype(np.float32)
