"""Where the end of a text occurred before in it: an index that grows with the text.

For each of some sizes n, a table says where the n-gram was seen last. A new token costs one entry
per size, whatever the length of the text. N-grams are looked up by a polynomial of their tokens
modulo 2^64, which slides along the text; a match is compared with the text itself, so that equal
keys of different n-grams do no harm.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.request import Request

MAX_TEXT = 1 << 17  # tokens of a request that are indexed at first: the last ones
_BASE = 0x9E3779B97F4A7C15  # odd, so that no token is multiplied away
_MASK = (1 << 64) - 1
_BULK = 48  # from so many new tokens on numpy is faster than a loop


class TextIndex:
    """A text and the last occurrence of each of its n-grams, for the given sizes n."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.text: list[int] = []
        self._sizes = tuple(sorted(set(sizes)))
        # For each size: key -> index of the token after its last occurrence. The n-gram at the very
        # end has none yet; its key waits in _end_keys until there is one.
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in self._sizes)
        self._end_keys = [0] * len(self._sizes)
        self._tables = tuple(
            (size, pow(_BASE, size - 1, 1 << 64), after)
            for size, after in zip(self._sizes, self._after, strict=True)
        )

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if len(tokens) >= _BULK:
            self._extend_bulk(tokens)
        else:
            self._extend_each(tokens)

    def match(self) -> tuple[int, int] | None:
        """(n, index of the token after it) of the largest n-gram that the text ends in and that
        occurred before; its most recent occurrence. None: there is none."""
        text = self.text
        for slot in range(len(self._sizes) - 1, -1, -1):
            size = self._sizes[slot]
            if len(text) < size:
                continue
            after = self._after[slot].get(self._end_keys[slot])
            if after is not None and text[after - size : after] == text[-size:]:
                return size, after
        return None

    def match_length(self, after: int, size: int, most: int) -> int:
        """How many tokens before index `after` equal the text's last ones: at most `most`, given
        that `size` of them do."""
        text = self.text
        end = len(text)
        most = min(most, after)
        while size < most and text[after - size - 1] == text[end - size - 1]:
            size += 1
        return size

    def continuation(self, after: int, count: int) -> list[int]:
        """The `count` tokens from index `after` on. Where the text ends it goes on with what was
        just copied: a text that repeats itself is continued for as long as wanted."""
        draft = self.text[after : after + count]
        period = len(self.text) - after
        while len(draft) < count:
            draft.append(draft[len(draft) - period])
        return draft

    def _extend_each(self, tokens: Sequence[int]) -> None:
        text, keys = self.text, self._end_keys
        for token in tokens:
            end, slot = len(text), 0
            for size, power, table in self._tables:
                key = keys[slot]
                if end >= size:
                    table[key] = end
                    key -= text[end - size] * power  # the token that leaves the window
                keys[slot] = (key * _BASE + token) & _MASK
                slot += 1  # noqa: SIM113 (the inner loop of every step)
            text.append(token)

    def _extend_bulk(self, tokens: Sequence[int]) -> None:
        """The same, for many tokens at once."""
        before, largest = len(self.text), self._sizes[-1]
        first = max(before - largest, 0)  # of the tokens that the new keys depend on
        window = np.array([*self.text[first:], *tokens], np.uint64)
        self.text.extend(tokens)
        keys = np.zeros(len(window), np.uint64)  # of the n-grams that end at each token
        power = 1
        for size in range(1, largest + 1):
            added = window[: max(len(window) - size + 1, 0)] * np.uint64(power)
            keys[len(window) - len(added) :] += added
            power = power * _BASE & _MASK
            if size not in self._sizes:
                continue
            slot = self._sizes.index(size)
            # N-grams that got a successor now, the one the text ended in before among them.
            start = max(before - 1, size - 1, 0)
            ends = keys[start - first : len(window) - 1].tolist()
            self._after[slot].update(zip(ends, range(start + 1, len(self.text)), strict=True))
            self._end_keys[slot] = int(keys[-1])


class RequestTexts:
    """The indexed prompt and output of each request that is drafted for."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._indexes: dict[str, tuple[TextIndex, int]] = {}  # and the first token's place

    def __len__(self) -> int:
        return len(self._indexes)

    def current(self, request: Request) -> TextIndex:
        """The index of all its tokens (of a very long prompt, of the last MAX_TEXT ones)."""
        total = request.num_tokens
        index, first = self._indexes.get(request.request_id, (None, 0))
        if index is None or first + len(index) > total:  # new, or some of its output was dropped
            index, first = TextIndex(self._sizes), max(total - MAX_TEXT, 0)
            self._indexes[request.request_id] = index, first
        seen = first + len(index)
        if seen < total:
            prompt = len(request.prompt_token_ids)
            output = request.output_token_ids
            index.extend(
                output[seen - prompt :] if seen >= prompt else request.token_ids(seen, total)
            )
        return index

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
