"""Host time of speculation: what the proposers and the control take per request and step.

    python scripts/bench_proposers.py [--rows 1 8 64] [--prompt 1000]

Drives each proposer as the engine does, over texts that half the time go on as they did before:
propose, accept what is right, observe, forget. Prints the median microseconds per request and step,
the control's (limits, width, observe, observe_step), and what the first call for a prompt takes,
which indexes it. No device is used.
"""

import argparse
import random
import statistics
import time

from jaxserve.engine.proposers.acceptance import judge
from jaxserve.engine.proposers.base import Proposer
from jaxserve.engine.proposers.control import DraftControl
from jaxserve.engine.proposers.lookahead import LookaheadProposer
from jaxserve.engine.proposers.ngram import NgramProposer
from jaxserve.engine.proposers.suffix import SuffixProposer
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams

STEPS = 150
DRAFTS = 8
WIDTHS = (1, 2, 3, 5, 9)
ROW_SIZES = (1, 4, 16, 64)
VOCABULARY = 50_000


def text(randomness: random.Random, length: int) -> list[int]:
    """Pieces of 5 to 40 tokens, every other one copied from what is there already."""
    tokens = [randomness.randrange(VOCABULARY) for _ in range(40)]
    while len(tokens) < length:
        size = randomness.randrange(5, 40)
        start = randomness.randrange(len(tokens))
        fresh = [randomness.randrange(VOCABULARY) for _ in range(size)]
        tokens += tokens[start : start + size] if randomness.random() < 0.5 else fresh
    return tokens[:length]


class Serving:
    """Requests whose outputs are given: drafts are right where they say the same."""

    def __init__(self, rows: int, num_prompt: int, seed: int) -> None:
        randomness = random.Random(seed)
        length = num_prompt + (STEPS + 1) * (DRAFTS + 1)
        self.texts = [text(randomness, length) for _ in range(rows)]
        self.requests = [
            Request(f"{seed}-{i}", tuple(t[:num_prompt]), SamplingParams(), 1 << 20, seed=0)
            for i, t in enumerate(self.texts)
        ]

    def accept(self, row: int, draft: list[int]) -> tuple[int, list[int]]:
        """(accepted drafts, new tokens), added to the request's output."""
        request, whole = self.requests[row], self.texts[row]
        start = request.num_tokens
        _, right = judge(draft, whole[start : start + len(draft)])
        emitted = whole[start : start + right + 1]
        request.output_token_ids += emitted
        return right, emitted


def microseconds(start: int) -> float:
    """Of this thread, so that other load on the machine does not count."""
    return (time.thread_time_ns() - start) / 1e3


def run(proposer: Proposer, serving: Serving) -> tuple[float, float, float, float]:
    """(first call, median step) of the proposer, the control's median step; per request, in us;
    and the tokens a step yields per request."""
    control = DraftControl(WIDTHS, ROW_SIZES)
    requests, rows = serving.requests, len(serving.requests)
    proposing, controlling, emitted_tokens = [], [], 0
    for _ in range(STEPS):
        start = time.thread_time_ns()
        limits = control.limits(requests, [DRAFTS] * rows)
        spent = microseconds(start)
        start = time.thread_time_ns()
        drafts = proposer.propose(requests, [DRAFTS] * rows)
        proposing.append(microseconds(start) / rows)
        start = time.thread_time_ns()
        control.width(requests, [len(draft) for draft in drafts])
        spent += microseconds(start)
        accepted = [serving.accept(row, draft) for row, draft in enumerate(drafts)]
        start = time.thread_time_ns()
        num_tokens = 0
        for request, draft, (right, emitted) in zip(requests, drafts, accepted, strict=True):
            control.observe(request.request_id, *judge(draft, emitted))
            proposer.observe(request, draft, right)
            num_tokens += len(emitted)
        control.observe_step(rows, WIDTHS[-1], 1.0, num_tokens, drafting=any(limits))
        controlling.append((spent + microseconds(start)) / rows)
        emitted_tokens += num_tokens
    return (
        proposing[0],
        statistics.median(proposing[1:]),
        statistics.median(controlling),
        emitted_tokens / rows / STEPS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    args = parser.parse_args()
    print(f"us per request and step; {args.prompt} prompt tokens, {DRAFTS} drafts")
    proposers = {"ngram": NgramProposer, "suffix": SuffixProposer, "lookahead": LookaheadProposer}
    for name, make in proposers.items():
        for rows in args.rows:
            proposer = make()
            for seed in range(2):  # the second finds what the first one left
                serving = Serving(rows, args.prompt, seed)
                first, step, control, tokens = run(proposer, serving)
                for request in serving.requests:
                    proposer.forget(request.request_id)
            print(
                f"{name:9s} {rows:3d} rows: propose {step:5.1f}  control {control:5.1f}  "
                f"first call {first:7.0f}  tokens per step {tokens:.2f}"
            )


if __name__ == "__main__":
    main()
