"""Host time of the prefix cache when it never hits: match, admit, commit, release, directly.

    python scripts/bench_prefix_cache_host.py [--groups 1] [--full]

Drives `KVManager` as the scheduler does, with prompts that share nothing: one request after the
other is matched, admitted, prefilled in chunks, decoded and released, with the cache on and off.
Prints the median microseconds of a request (match + admit + release), of a commit and the growing
before it, and of everything divided by the request's steps, which is what a request costs per
step. --full fills the pool first, so that every page taken evicts one. Every call includes reading
the clock, with the cache on and off alike.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

from jaxserve.engine.kv_manager import KVManager
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams

PROMPTS = (32, 128, 500, 1000, 2000)
OUTPUT = 100
CHUNK = 512
PAGE_SIZE = 16
NUM_PAGES = 8192
WINDOW = 512
REPEATS = 9

_names = itertools.count()


def make_request(num_prompt: int) -> Request:
    """A prompt that begins like no other."""
    name = next(_names)
    prompt = tuple((name * 7919 + index * 31) % 50_000 for index in range(num_prompt))
    return Request(str(name), prompt, SamplingParams(), max_tokens=OUTPUT, seed=0)


def timed(function: Callable[[], object]) -> float:
    """Microseconds of this thread, so that other load on the machine does not count."""
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def run_request(manager: KVManager, num_prompt: int) -> tuple[float, list[float]]:
    """Microseconds of match + admit + release, and of each step's grow + commit."""
    request = make_request(num_prompt)
    once = timed(lambda: manager.match(request)) + timed(lambda: manager.admit(request))
    assert request.num_computed == 0
    steps = []
    while len(request.output_token_ids) < OUTPUT:
        size = min(CHUNK, request.num_uncomputed)
        spent = timed(lambda: manager.grow(request, request.num_computed + size))  # noqa: B023
        request.num_computed += size
        if request.num_uncomputed == 0:
            request.output_token_ids.append(7)
        spent += timed(lambda: manager.commit(request))
        steps.append(spent)
    return once + timed(lambda: manager.release(request)), steps


def measure(num_prompt: int, num_groups: int, *, cache: bool, full: bool) -> tuple[float, ...]:
    """Medians over requests: (a request, a decode step, everything per step)."""
    windows = (None, *[WINDOW] * (num_groups - 1))
    manager = KVManager(NUM_PAGES, PAGE_SIZE, windows, max_chunk=CHUNK, prefix_cache=cache)
    while full and cache and manager.stats.evicted_pages == 0:
        run_request(manager, 2000)
    requests = [run_request(manager, num_prompt) for _ in range(REPEATS)]
    return (
        statistics.median(once for once, _ in requests),
        statistics.median(step for _, steps in requests for step in steps),
        statistics.median((once + sum(steps)) / len(steps) for once, steps in requests),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1, help="table groups; all but one windowed")
    parser.add_argument("--full", action="store_true", help="every page taken evicts one")
    args = parser.parse_args()
    print(f"{args.groups} groups, {OUTPUT} output tokens, us: request | median step | per step")
    for num_prompt in PROMPTS:
        on = measure(num_prompt, args.groups, cache=True, full=args.full)
        off = measure(num_prompt, args.groups, cache=False, full=args.full)
        parts = [
            f"{name} {values[0]:7.1f} | {values[1]:5.2f} | {values[2]:5.2f}"
            for name, values in (
                ("on", on),
                ("off", off),
                ("difference", tuple(a - b for a, b in zip(on, off, strict=True))),
            )
        ]
        print(f"{num_prompt:5d} prompt tokens: " + "   ".join(parts))


if __name__ == "__main__":
    main()
