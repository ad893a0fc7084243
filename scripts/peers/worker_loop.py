"""The loop that every engine of scripts/bench_vs_peers runs in its own process and environment.

One JSON command a line on stdin, one JSON answer a line on stdout; stdout of the libraries goes to
stderr. Standard library only, so that it runs in every peer's environment.

  {"load": {...}}                              -> {"about": {...}}, whatever the engine tells
  {"prompts": [[ids], ...], "new_tokens": n}   -> {"first": s, "last": s, "counts": [n, ...],
                                                   "ids": [[...], ...] or null}

first and last are seconds from handing the prompts over until the first and the last token of any
of them came out; counts are the tokens that the engine says it produced for each prompt.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

PR_SET_PDEATHSIG = 1
Prompts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """What one measurement gave; see the module's text."""

    first: float
    last: float
    counts: list[int]
    ids: Prompts | None


Generate = Callable[[Prompts, int], Run]
Load = Callable[[dict[str, Any]], tuple[Generate, dict[str, Any]]]


def end_with_parent() -> None:
    """Be killed when the benchmark dies, even while stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pin_to_cores(threads: int) -> None:
    """Let this process run on `threads` cores only, whatever its libraries' pools think."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def serve(load: Load) -> None:
    """Answer commands until stdin ends. `load` gets the "load" object of the first command."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate: Generate | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            pin_to_cores(command["load"]["threads"])
            generate, about = load(command["load"])
            answer: dict[str, Any] = {"about": about}
        else:
            assert generate is not None
            answer = asdict(generate(command["prompts"], command["new_tokens"]))
        print(json.dumps(answer), file=answers, flush=True)
