"""What an answer says of its prompt: the text and ids again, and its tokens' logprobs.

The engine computes logprobs of a prompt once, for the first choice; in a completions answer every
choice shows them, in front of its own. So a stream holds the other choices back until they are
there (`PromptFirst`); they nearly always are, because the others begin after the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.outputs import Logprob, OutputDelta
from jaxserve.loading.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say

Entries = list[dict[int, Logprob] | None]


@dataclass(frozen=True)
class PromptEcho:
    """What of one prompt goes into its choices.

    text (echo), token_ids (return_token_ids). text_offsets: where each of its tokens begins in the
    text, if it is echoed with logprobs; echo_logprobs: with how many alternatives; first_token: the
    one that has none.
    prompt_logprobs: alternatives of the field of that name; None: not asked for.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    text_offsets: tuple[int, ...] | None = None
    echo_logprobs: int = 0
    first_token: str = ""
    prompt_logprobs: int | None = None

    @property
    def shows_logprobs(self) -> bool:
        return self.text_offsets is not None or self.prompt_logprobs is not None


class PromptFirst:
    """Holds back what comes of a prompt's other choices before its first one has begun."""

    def __init__(self, n: int) -> None:
        """n: choices of every prompt; choice = prompt * n + j."""
        self._n = n
        self._begun: set[int] = set()
        self._held: dict[int, list[tuple[int, OutputDelta]]] = {}

    def pass_on(self, batch: Sequence[tuple[int, OutputDelta]]) -> list[tuple[int, OutputDelta]]:
        """What of the batch, and of what was held, may be sent now, in order."""
        passed = []
        for choice, delta in batch:
            prompt, j = divmod(choice, self._n)
            if j == 0 and (delta.prompt_logprobs is not None or delta.finish_reason is not None):
                self._begun.add(prompt)
                passed += [(choice, delta), *self._held.pop(prompt, ())]
            elif prompt in self._begun:
                passed.append((choice, delta))
            else:
                self._held.setdefault(prompt, []).append((choice, delta))
        return passed


def token_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Where in its text each token of a prompt begins.

    A token without text of its own (BOS, which the tokenizer put in front; the first bytes of a
    character) begins where the next text does. Special tokens count if they are part of the text.
    """
    offsets: list[int] = []
    for hide_special in (False, True):
        detokenizer = tokenizer.detokenizer((), hide_special)
        offsets, end = [], 0
        for token in ids:
            offsets.append(min(end, len(text)))
            end += len(detokenizer.push((token,)))
        if end + len(detokenizer.finish()) == len(text):
            break
    return tuple(offsets)


def prompt_logprobs_field(entries: Entries | None, num_top: int) -> list[Any] | None:
    """vLLM's field `prompt_logprobs`: null for the first token, then an object of token ids."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in _most_likely(entry, num_top).items()
        }
        for entry in entries
    ]


def completion_logprobs(entries: Sequence[dict[int, Logprob]], offset: int) -> dict[str, list[Any]]:
    """OpenAI's object of output tokens, the first of which begins at `offset` of the text."""
    fields = _no_logprobs()
    for entry in entries:
        _add(fields, entry, offset)
        offset += len(fields["tokens"][-1])
    return fields


def echoed_logprobs(entries: Entries, echo: PromptEcho) -> dict[str, list[Any]]:
    """The same of the prompt: its first token has no logprob."""
    fields = _no_logprobs()
    assert echo.text_offsets is not None
    for entry, offset in zip(entries, echo.text_offsets, strict=True):
        if entry is not None:
            _add(fields, _most_likely(entry, echo.echo_logprobs), offset)
            continue
        for name, value in zip(fields, (echo.first_token, None, None, offset), strict=True):
            fields[name].append(value)
    return fields


def finite(logprob: float) -> float:
    """The logprob, or what stands for minus infinity."""
    return max(logprob, LOGPROB_FLOOR)


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _add(fields: dict[str, list[Any]], entry: dict[int, Logprob], offset: int) -> None:
    own = next(iter(entry.values()))
    top: dict[str, float] = {}
    for candidate in entry.values():  # two ids may share a text: the first, likelier, stays
        top.setdefault(candidate.decoded_token, finite(candidate.logprob))
    fields["tokens"].append(own.decoded_token)
    fields["token_logprobs"].append(finite(own.logprob))
    fields["top_logprobs"].append(top)
    fields["text_offset"].append(offset)


def _most_likely(entry: dict[int, Logprob], num_top: int) -> dict[int, Logprob]:
    """The token itself, which comes first, and the others of the num_top most likely ones."""
    own = next(iter(entry))
    return {token: one for token, one in entry.items() if token == own or one.rank <= num_top}
