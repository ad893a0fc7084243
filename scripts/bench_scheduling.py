"""What scheduler, KV pages, prefix cache and the loop are worth: tables, targets, verdicts.

    python scripts/bench_scheduling.py [--only waste batching prefix stall overlap] [--json FILE]

waste     places in KV pages that hold no token, against contiguous reservation; takes no model
batching  continuous against static batching, and against the ideal of the same trace
prefix    time to the first token with a shared prefix, and the cache's host time without hits
stall     gaps in running streams while a prompt of 6,000 tokens arrives
overlap   the asynchronous loop against the synchronous one, in turns

Each is explained in scripts/scheduling/NAME.py. --quick shows in a minute or two that everything
runs; its numbers mean nothing. Run it with nothing else running.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.scheduling import batching, overlap, prefix, stall, waste
from scripts.scheduling.engine_runs import Loaded, load
from scripts.scheduling.verdicts import Report

ITEMS = ("waste", "batching", "prefix", "stall", "overlap")
ROUNDS = {"batching": 1, "prefix": 3, "stall": 3, "overlap": 10}


def say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def measures(options: argparse.Namespace) -> dict[str, Callable[[], Report]]:
    """What each item runs."""

    @cache
    def loaded() -> Loaded:
        return load(options.model)

    def rounds(item: str) -> int:
        return options.rounds or (1 if options.quick else ROUNDS[item])

    quick = options.quick
    outputs = (4, 8, 24, 48) if quick else batching.OUTPUT_LENGTHS
    requests = 24 if quick else options.requests
    return {
        "waste": waste.run,
        "batching": lambda: batching.run(loaded(), rounds("batching"), requests, outputs),
        "prefix": lambda: prefix.run(
            loaded(),
            rounds("prefix"),
            4 if quick else prefix.NUM_REQUESTS,
            200 if quick else prefix.PREFIX_TOKENS,
        ),
        "stall": lambda: stall.run(loaded(), rounds("stall"), 600 if quick else stall.LONG_PROMPT),
        "overlap": lambda: overlap.run(loaded(), max(2, rounds("overlap")), 0.1 if quick else 1.0),
    }


def facts(options: argparse.Namespace) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.machine(),
        "threads": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "model": options.model,
        "quick": options.quick,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=ITEMS, help="default: all")
    parser.add_argument("--model", default="smollm2", help="a pulled model or a path")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--requests", type=int, default=batching.NUM_REQUESTS, help="of batching")
    parser.add_argument("--quick", action="store_true", help="tiny: does everything run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    return parser.parse_args()


def main() -> None:
    options = parse()
    about = facts(options)
    if options.quick:
        print("QUICK RUN: the numbers and verdicts below mean nothing")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    reports = []
    for item, measure in measures(options).items():
        if item in options.only:
            say(item)
            reports.append(measure())
            print(f"\n{reports[-1].text()}", flush=True)
    if options.json:
        found = {**about, "items": {report.item: report.as_json() for report in reports}}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        say(f"written to {options.json}")


if __name__ == "__main__":
    main()
