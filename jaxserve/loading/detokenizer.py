"""Text of a growing token sequence, emitted once it can no longer change.

Joined pushes equal the text that `Tokenizer.decode` gives for the whole sequence, minus the
prompt's: a character cut between tokens waits for its last byte, and the space that SentencePiece
puts in front of a text is dropped at the start of the sequence only, never from a continuation.
"""

import codecs
from collections.abc import Sequence

from jaxserve.loading.token_text import TokenText

_CONTEXT_BYTES = 3  # a UTF-8 character has at most 4 bytes, so an open one has at most 3


class IncrementalDetokenizer:
    """One stream's decoder: constant work per token, no text kept.

    If the prompt ends inside a character, its open bytes belong to the continuation: the first
    push completes that character.
    """

    def __init__(
        self, text: TokenText, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._bytes_of = text.visible if skip_special_tokens else text.spoken
        self._errors = text.errors
        self._open = _open_character(self._tail(prompt_ids))
        self._strip = text.strip_first_space and not self._says_anything(prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; the new text that no later token can change."""
        table = self._bytes_of
        data = self._open + (table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids]))
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._open = data[used:]
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text

    def finish(self) -> str:
        """The rest: an unfinished character as U+FFFD. Nothing may be pushed after it."""
        text, _ = codecs.utf_8_decode(self._open, self._errors, True)
        self._open = b""
        return text

    def _says_anything(self, ids: Sequence[int]) -> bool:
        return any(self._bytes_of[i] for i in ids)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """The last bytes of a prompt, enough to see an open character."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._bytes_of[token_id] + tail
            if len(tail) >= _CONTEXT_BYTES:
                break
        return tail


def _open_character(tail: bytes) -> bytes:
    """The bytes at the end that begin a character and could still be completed."""
    for length in range(1, min(_CONTEXT_BYTES, len(tail)) + 1):
        last = tail[-length:]
        if last[0] >= 0xC0:  # a lead byte
            _, used = codecs.utf_8_decode(last, "replace", False)
            return last[used:]
    return b""
