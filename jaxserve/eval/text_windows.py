"""Cuts a text into overlapping windows, so that a text of any length fits the model's context.

The rule is the usual one for perplexity of models with a fixed context: windows of `context` tokens
start `stride` tokens apart, and each scores only the tokens that no window before it scored. So
every token is scored once, and all but those of the first window see at least
context - stride tokens before them. Every window begins with what the tokenizer puts in front of a
text (a BOS): models that were trained with one say little of use without it. Where there is none,
the first token of the text has nothing before it and is not scored. Plain Python: no jax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError


@dataclass(frozen=True)
class Window:
    """token_ids: what the model reads and is asked for. The first scored token is token_ids[first];
    from there on every token is scored, from the ones before it."""

    token_ids: tuple[int, ...]
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def num_inputs(self) -> int:
        """Tokens that the model must read: the last one is only asked for."""
        return len(self.token_ids) - 1


def text_windows(
    text_ids: Sequence[int], prefix: Sequence[int], *, context: int, stride: int
) -> list[Window]:
    """The windows of a text, in order. prefix: the tokens that stand in front of every window.

    Raises InvalidRequestError for a stride that leaves nothing before a token, a context that
    holds no text, and a text in which there is nothing to score.
    """
    room = context - len(prefix)
    if context < 2 or room < 1:
        raise InvalidRequestError(
            f"context is {context}; give at least {max(2, len(prefix) + 1)} tokens", "context"
        )
    if not 1 <= stride < context or stride > room:
        raise InvalidRequestError(
            f"stride is {stride}; give 1 to {min(context - 1, room)}, less than the context of "
            f"{context} tokens",
            "stride",
        )
    scored = 0 if prefix else 1
    if len(text_ids) <= scored:
        raise InvalidRequestError(
            f"the text has {len(text_ids)} tokens; perplexity needs at least {scored + 1}", "text"
        )
    windows = []
    for start in range(0, len(text_ids), stride):
        end = min(start + room, len(text_ids))
        ids = (*prefix, *text_ids[start:end])
        windows.append(Window(ids, len(prefix) + scored - start))
        scored = end
        if end == len(text_ids):
            break
    return windows
