"""The mixed trace: how long prompts and outputs are, in the order in which requests arrive.

    python -m scripts.scheduling.mixed_trace    # writes mixed_trace.csv again, the same bytes

Rule: 400 requests; prompt lengths from 20 to 2,000 tokens and output lengths from 10 to 500, both
drawn independently and evenly on a logarithmic scale (many short, few long, as in chat logs), with
Python's `random.Random("jaxserve mixed trace")`; prompt first, then output, request by request.
All requests are there at the start; only rows and pages decide when each enters.
"""

import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("mixed_trace.csv")
NUM_REQUESTS = 400
PROMPT_TOKENS = (20, 2000)
OUTPUT_TOKENS = (10, 500)
Lengths = tuple[int, int]  # of prompt and output


def draw() -> Iterator[Lengths]:
    """The lengths by the rule above."""
    drawn = random.Random("jaxserve mixed trace")
    for _ in range(NUM_REQUESTS):
        yield _log_uniform(drawn, *PROMPT_TOKENS), _log_uniform(drawn, *OUTPUT_TOKENS)


def read(path: Path = FILE) -> list[Lengths]:
    """The trace as it is kept in the repository."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            (int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)
        ]


def write(path: Path = FILE) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["prompt_tokens", "output_tokens"])
        writer.writerows(draw())


def _log_uniform(drawn: random.Random, low: int, high: int) -> int:
    return round(math.exp(drawn.uniform(math.log(low), math.log(high))))


if __name__ == "__main__":
    write()
