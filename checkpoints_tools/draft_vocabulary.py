"""The words an EAGLE-3 draft can say: those its training text uses most."""

import numpy as np

from checkpoints_tools.training_text import PADDING, Windows

PRIOR_TOKENS = 50_000  # what the order of the ids counts, against the tokens of the text
_FLATTEN = 300.0


def frequent_words(windows: Windows, size: int, vocab_size: int) -> np.ndarray:
    """`size` of the target's ids, ascending, int32 [size], by how often they are to be expected.

    A short text has few words, so the order of the ids counts too: tokenizers that learn by merging
    number what they met most often first. (In Zipf's law frequency goes as 1 / rank.)
    """
    counts = np.bincount(windows.tokens[windows.rows != PADDING], minlength=vocab_size)
    prior = 1 / (np.arange(vocab_size) + _FLATTEN)
    expected = counts[:vocab_size] + PRIOR_TOKENS * prior / prior.sum()
    order = np.argsort(-expected, kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def coverage(windows: Windows, words: np.ndarray) -> float:
    """The share of the windows' tokens that are among these words."""
    return float(np.isin(windows.tokens[windows.rows != PADDING], words).mean())


def to_published(words: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(d2t int64 [size], t2d bool [vocab_size]) as EAGLE-3 checkpoints hold them."""
    present = np.zeros(vocab_size, np.bool_)
    present[words] = True
    return words.astype(np.int64) - np.arange(len(words)), present
