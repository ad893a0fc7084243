"""Text to token ids and back: a thin, immutable face on the `tokenizers` library."""

from collections.abc import Mapping, Sequence

import tokenizers

from jaxserve.errors import InvalidRequestError
from jaxserve.loading.detokenizer import IncrementalDetokenizer
from jaxserve.loading.token_text import token_text


class Tokenizer:
    """Encodes and decodes; any number of threads may use one instance.

    named: ids of the tokens with a role, under "bos", "eos", "unk", "pad"; a role may be absent.
    prefix_ids, suffix_ids: what a text gets in front and behind unless add_special_tokens is
    False (a BOS, usually). A text that already starts with the prefix does not get it twice.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, int] | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._named = dict(named or {})
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        self._text = token_text(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Ids that may be used: 0 <= id < vocab_size, added tokens included."""
        return len(self._text.spoken)

    @property
    def bos_token_id(self) -> int | None:
        return self._named.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self._named.get("eos")

    @property
    def bos_token(self) -> str | None:
        return self._named_token("bos")

    @property
    def eos_token(self) -> str | None:
        return self._named_token("eos")

    @property
    def unk_token(self) -> str | None:
        return self._named_token("unk")

    @property
    def pad_token(self) -> str | None:
        return self._named_token("pad")

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text gets a BOS in front."""
        return self.bos_token_id is not None and self.bos_token_id in self._prefix

    @property
    def adds_eos(self) -> bool:
        """Whether a plain text gets an EOS behind."""
        return self.eos_token_id is not None and self.eos_token_id in self._suffix

    def to_json(self) -> str:
        """What a tokenizer.json holds: all but the roles of tokens and what goes around a text."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; InvalidRequestError if it cannot be encoded."""
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if self._suffix and ids[-len(self._suffix) :] != self._suffix:
            ids = ids + self._suffix
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; InvalidRequestError for an id outside the vocabulary."""
        return self._text.decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """One token as text, for logprobs: its own spaces kept, part of a character as U+FFFD."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"token id {str(token_id)[:40]} is outside the vocabulary of {self.vocab_size} ids"
            )
        return self._text.spoken[token_id].decode("utf-8", self._text.errors)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it ("<|im_end|>"), or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A decoder of what follows the prompt."""
        return IncrementalDetokenizer(self._text, prompt_ids, skip_special_tokens)

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise InvalidRequestError(
                "the text is not valid Unicode (it holds half of a surrogate pair); "
                "send it as UTF-8"
            ) from error
        except BaseException as error:
            # The library's panics pass `except Exception`; one text must not end a worker thread.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequestError(
                f"the tokenizer library fails on this text: {str(error)[:200]}"
            ) from error
        return ids

    def _named_token(self, role: str) -> str | None:
        token_id = self._named.get(role)
        return None if token_id is None else self._backend.id_to_token(token_id)
