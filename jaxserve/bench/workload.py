"""What a benchmark sends: random prompts of exact length, or prompts of a file."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequestError

FIRST_RANDOM_ID = 256  # ids below are special tokens or raw bytes in most vocabularies
MAX_FILE_BYTES = 2 << 30
MAX_ROWS = 1_000_000
_WORDS = (
    "the of and to in is it you that he was for on are with as they be at one have this from or "
    "had by word but what some we can out other were all there when up use your how said"
)


@dataclass(frozen=True)
class BenchRequest:
    """One request: exactly one of token_ids, text and messages is set.

    max_tokens is the output asked for; prompt_tokens is None where only the server can count.
    """

    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None

    @property
    def prompt_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True)
class RandomWorkload:
    """Prompts of random token ids: nothing to cache, lengths exact.

    Lengths are drawn uniformly from len * (1 - range_ratio) to len * (1 + range_ratio).
    vocab_size: ids are drawn from [FIRST_RANDOM_ID, vocab_size), or all of it if it is small.
    """

    num_prompts: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int
    range_ratio: float = 0.0

    def requests(self, seed_offset: int = 0, *, as_text: bool = False) -> list[BenchRequest]:
        """The prompts; another offset gives other prompts of the same kind.

        as_text: input_len common English words instead of ids, for endpoints that take text only.
        """
        drawn = random.Random(f"{self.seed}/{seed_offset}")
        first = FIRST_RANDOM_ID if self.vocab_size > 2 * FIRST_RANDOM_ID else 0
        words = _WORDS.split()
        made = []
        for _ in range(self.num_prompts):
            input_len = self._length(self.input_len, drawn)
            output_len = self._length(self.output_len, drawn)
            if as_text:
                text = " ".join(drawn.choice(words) for _ in range(input_len))
                made.append(BenchRequest(output_len, text=text))
            else:
                ids = tuple(drawn.randrange(first, self.vocab_size) for _ in range(input_len))
                made.append(BenchRequest(output_len, token_ids=ids))
        return made

    def _length(self, length: int, drawn: random.Random) -> int:
        spread = int(length * self.range_ratio)
        return max(1, drawn.randint(length - spread, length + spread))

    def describe(self) -> str:
        spread = f" +-{self.range_ratio:.0%}" if self.range_ratio else ""
        return (
            f"{self.num_prompts} random prompts, {self.input_len} tokens in, "
            f"{self.output_len} out{spread}, seed {self.seed}"
        )


def read_dataset(
    path: Path, num_prompts: int, output_len: int | None, seed: int
) -> list[BenchRequest]:
    """num_prompts requests drawn from a file, repeating it when it has fewer.

    The file is JSON lines, or one JSON list. A row is {"prompt": text}, {"messages": [...]} or
    ShareGPT's {"conversations": [{"from": ..., "value": ...}, ...]} (its first turn is taken), and
    may carry "max_tokens"; output_len overrides it; without either 128 tokens are asked for.

    Raises InvalidRequestError naming the file and row.
    """
    rows = [_request(row, number, path, output_len) for number, row in _rows(path)]
    if not rows:
        raise InvalidRequestError(f"{path} has no rows to send", "dataset_path")
    drawn = random.Random(seed)
    drawn.shuffle(rows)
    return [rows[index % len(rows)] for index in range(num_prompts)]


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequestError(f"{path} is larger than 2 GiB; give a part", "dataset_path")
        with path.open(encoding="utf-8") as file:
            start = file.read(1)
            file.seek(0)
            if start == "[":
                yield from enumerate(json.load(file)[:MAX_ROWS], 1)
                return
            for number, line in enumerate(file, 1):
                if number > MAX_ROWS:
                    return
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot read {path}: {error.strerror}; give a JSON-lines file", "dataset_path"
        ) from None
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{path} is not JSON: {error}", "dataset_path") from None


def _request(row: Any, number: int, path: Path, output_len: int | None) -> BenchRequest:
    fields = row if isinstance(row, dict) else {}
    max_tokens = output_len if output_len is not None else fields.get("max_tokens", 128)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidRequestError(f"{path} row {number}: max_tokens is no positive number")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str) and prompt:
        return BenchRequest(max_tokens, text=prompt)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return BenchRequest(max_tokens, messages=tuple(messages))
    text = _first_turn(fields.get("conversations"))
    if text is None:
        raise InvalidRequestError(
            f'{path} row {number} has no "prompt", "messages" or "conversations" to send',
            "dataset_path",
        )
    return BenchRequest(max_tokens, text=text)


def _first_turn(conversations: Any) -> str | None:
    first = conversations[0] if isinstance(conversations, Sequence) and conversations else None
    text = first.get("value") if isinstance(first, dict) else None
    return text if isinstance(text, str) and text else None
