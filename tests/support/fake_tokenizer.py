"""A tokenizer made of a list of byte pieces: every id's text is known by heart in a test."""

import codecs
from collections.abc import Sequence


class FakeTokenizer:
    """Token id i is `pieces[i]`. A piece may be half a character; ids in `special` can be hidden.

    encode is greedy, longest piece first; with `bos` set it puts that id in front.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | str],
        *,
        special: Sequence[int] = (),
        bos: int | None = None,
    ) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.special = frozenset(special)
        self.bos = bos

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def bos_token_id(self) -> int | None:
        return self.bos

    @property
    def adds_bos(self) -> bool:
        return self.bos is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data = text.encode()
        ids = [self.bos] if add_special_tokens and self.bos is not None else []
        while data:
            fits = [i for i, p in enumerate(self.pieces) if p and data.startswith(p)]
            if not fits:
                raise ValueError(f"no piece for {data[:8]!r}")
            best = max(fits, key=lambda i: len(self.pieces[i]))
            ids.append(best)
            data = data[len(self.pieces[best]) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special if skip_special_tokens else frozenset()
        return b"".join(self.pieces[i] for i in ids if i not in hidden).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> "FakeDetokenizer":
        return FakeDetokenizer(self, skip_special_tokens)


class FakeDetokenizer:
    """Incremental UTF-8 over the pieces; half a character waits for its rest."""

    def __init__(self, tokenizer: FakeTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = (self._tokenizer.pieces[i] for i in ids if i not in self._hidden)
        return "".join(self._decoder.decode(piece) for piece in pieces)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
