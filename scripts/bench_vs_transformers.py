"""Measures jaxserve and transformers in turns on one machine and prints paired ratios.

Started by scripts/bench_vs_transformers. Both sides hold the same float32 weights, dequantised
from the same GGUF file, and get the same prompts of random ids; each round runs both sides next to
each other, the order alternating, and gives one ratio per quantity. Greedy, EOS ignored.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxserve.bench.sampling import BenchSampling
from jaxserve.bench.workload import RandomWorkload
from jaxserve.llm import LLM
from jaxserve.loading.hub import resolve

INPUT_LEN = OUTPUT_LEN = 128
STREAMS = 16
SAMPLING = BenchSampling(temperature=0.0, ignore_eos=True)
Prompts = list[list[int]]
Side = Callable[[Prompts, int], tuple[float, Prompts]]  # (prompts, new tokens) -> seconds, ids


@dataclass(frozen=True)
class Comparison:
    """One line of the table. The ratio says how many times better jaxserve is."""

    name: str
    unit: str
    target: float | None
    higher_is_better: bool
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        self.ours.append(ours)
        self.theirs.append(theirs)

    def ratios(self) -> list[float]:
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return [a / b if self.higher_is_better else b / a for a, b in pairs]

    def line(self) -> str:
        ratios = self.ratios()
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        numbers = f"{statistics.median(self.ours):10.2f}{statistics.median(self.theirs):14.2f}"
        verdict = ""
        if self.target is not None:
            reached = "reached" if middle >= self.target else "MISSED"
            verdict = f"   >= {self.target:g} {reached}"
        return (
            f"{self.name + ' (' + self.unit + ')':<46}{numbers}"
            f"   {low:.2f} / {middle:.2f} / {high:.2f}{verdict}"
        )

    def as_json(self) -> dict[str, Any]:
        ratios = self.ratios()
        return {
            "name": self.name,
            "unit": self.unit,
            "jaxserve": self.ours,
            "transformers": self.theirs,
            "ratios": ratios,
            "ratio_min": min(ratios),
            "ratio_median": statistics.median(ratios),
            "ratio_max": max(ratios),
            "target": self.target,
        }


class Peer:
    """The process that runs transformers; idle (blocked on its stdin) while jaxserve is timed."""

    def __init__(self, python: str, gguf: Path) -> None:
        worker = Path(__file__).resolve().parent / "transformers_peer.py"
        self._process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._ask({"load": str(gguf)})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the peer ended with exit code {self._process.wait()}; see its message above")
        return dict(json.loads(answer))

    def _generate(self, prompts: Prompts, new_tokens: int, batch: bool) -> tuple[float, Prompts]:
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens, "batch": batch})
        return float(answer["seconds"]), answer["outputs"]

    def sequential(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        return self._generate(prompts, new_tokens, batch=False)

    def batch(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        return self._generate(prompts, new_tokens, batch=True)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ours(llm: LLM) -> Side:
    def side(prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        params = SAMPLING.params(new_tokens)
        start = time.perf_counter()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(result.outputs[0].token_ids) for result in results]

    return side


def both(
    first_ours: bool, our_side: Side, their_side: Side, prompts: Prompts, new_tokens: int
) -> tuple[tuple[float, Prompts], tuple[float, Prompts]]:
    """Run both sides next to each other; returns (ours, theirs) whatever the order."""
    if first_ours:
        mine = our_side(prompts, new_tokens)
        return mine, their_side(prompts, new_tokens)
    theirs = their_side(prompts, new_tokens)
    return our_side(prompts, new_tokens), theirs


def comparisons() -> dict[str, Comparison]:
    return {
        "token": Comparison("1 stream, time per output token", "ms", 1.8, False),
        "decode": Comparison("1 stream, the same without the prompt", "ms", None, False),
        "sequential": Comparison(f"{STREAMS} streams, against one by one", "tok/s", 5.0, True),
        "batch": Comparison(f"{STREAMS} streams, against one batch", "tok/s", 1.0, True),
    }


def measure(llm: LLM, peer: Peer, rounds: int) -> tuple[dict[str, Comparison], list[bool]]:
    """All rounds; returns the comparisons and, per output, whether both sides wrote the same."""
    table, same = comparisons(), []
    our_side = ours(llm)
    vocab = llm.model.vocab_size
    for number in range(-1, rounds):  # round -1 warms both sides up and is not counted
        first_ours = number % 2 == 0
        say(f"round {number + 1} of {rounds}" if number >= 0 else "warm-up")
        workload = RandomWorkload(STREAMS, INPUT_LEN, OUTPUT_LEN, vocab, seed=number)
        if number < 0:
            prompts = draw(workload, 0)
            both(True, our_side, peer.batch, prompts, 4)
            both(True, our_side, peer.sequential, prompts[:1], 4)
            continue
        one = draw(workload, 0)[:1]
        mine, theirs = both(first_ours, our_side, peer.sequential, one, OUTPUT_LEN)
        table["token"].add(1e3 * mine[0] / OUTPUT_LEN, 1e3 * theirs[0] / OUTPUT_LEN)
        one = draw(workload, 1)[:1]
        my_first, their_first = both(first_ours, our_side, peer.sequential, one, 1)
        steps = OUTPUT_LEN - 1
        table["decode"].add(
            1e3 * (mine[0] - my_first[0]) / steps, 1e3 * (theirs[0] - their_first[0]) / steps
        )
        prompts = draw(workload, 2)
        mine, theirs = both(first_ours, our_side, peer.batch, prompts, OUTPUT_LEN)
        tokens = STREAMS * OUTPUT_LEN
        table["batch"].add(tokens / mine[0], tokens / theirs[0])
        same += [a == b for a, b in zip(mine[1], theirs[1], strict=True)]
        prompts = draw(workload, 3)
        mine, theirs = both(first_ours, our_side, peer.sequential, prompts, OUTPUT_LEN)
        table["sequential"].add(tokens / mine[0], tokens / theirs[0])
        same += [a == b for a, b in zip(mine[1], theirs[1], strict=True)]
    return table, same


def draw(workload: RandomWorkload, number: int) -> Prompts:
    """Other prompts for every measurement, so that no cache knows them."""
    return [list(request.token_ids or ()) for request in workload.requests(number)]


def say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}


def report_text(facts: dict[str, Any], table: Sequence[Comparison], same: Sequence[bool]) -> str:
    head = f"{'':<46}{'jaxserve':>10}{'transformers':>14}   ratio min / median / max"
    lines = [f"{name:<14}{value}" for name, value in facts.items()]
    lines += ["", head, *(comparison.line() for comparison in table), ""]
    lines.append(f"outputs that are the same, token by token: {sum(same)} of {len(same)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="jaxserve against transformers' generate.")
    parser.add_argument("--peer-python", required=True, help="interpreter with torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON report; default: a file in results/")
    options = parser.parse_args()
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **machine()}
    gguf = resolve("smollm2")
    say("loading both sides")
    peer = Peer(options.peer_python, gguf)
    with LLM(str(gguf), dtype="float32", max_batch_rows=STREAMS) as llm:
        facts["model"] = f"{gguf.name}, float32, the same weights on both sides"
        facts["workload"] = f"{INPUT_LEN} random tokens in, {OUTPUT_LEN} out, greedy, EOS ignored"
        facts["jaxserve"] = f"{version('jaxserve')}, jax {version('jax')}"
        facts["peer"] = peer.about
        table, same = measure(llm, peer, options.rounds)
    peer.close()
    print(report_text(facts, list(table.values()), same))
    report = {**facts, "comparisons": [c.as_json() for c in table.values()]}
    report["same_outputs"] = [sum(same), len(same)]
    root = Path(__file__).resolve().parent.parent
    output = (
        options.output
        or root / "results" / f"vs_transformers-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(f"written to {output}")


if __name__ == "__main__":
    main()
