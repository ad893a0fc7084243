"""The time to the first token with a shared prefix, and what the cache costs when it never hits.

Requests that begin with the same 1,000 tokens, followed by 32 of their own, with the prefix cache
on and off, in turns; every round has another prefix, which no cache knows. Two ways of arriving:
all at once, where most of the time is waiting for others, and one after another, where it is the
request's own. Host time: scripts/bench_prefix_cache_host.py, for prompts that share nothing.
"""

import statistics
from collections.abc import Iterator, Sequence

from jaxserve.engine.engine import Engine
from scripts.bench_prefix_cache_host import OUTPUT, PROMPTS, measure
from scripts.scheduling.engine_runs import EngineRun, Loaded, Work
from scripts.scheduling.verdicts import Report, Rows, Target

LEAST_RATIO = 5.0
MOST_HOST_MICROSECONDS = 20.0
NUM_REQUESTS = 32
PREFIX_TOKENS = 1000
OWN_TOKENS = 32
OUTPUT_TOKENS = 16
WAYS = ("all at once", "one after another")


def run(loaded: Loaded, rounds: int, num_requests: int, prefix_tokens: int) -> Report:
    engines = {name: loaded.engine(prefix_cache=name == "on") for name in ("on", "off")}
    found = {(way, name): list[float]() for way in WAYS for name in engines}
    hits = []
    for number in range(rounds):
        for way in WAYS:
            for name in sorted(engines, reverse=bool(number % 2)):
                work = draw(loaded, num_requests, prefix_tokens)
                ttft, hit_share = first_tokens(engines[name], work, way == WAYS[0])
                found[way, name].append(statistics.median(ttft))
                hits += [hit_share] if name == "on" else []
    return _report(found, hits, num_requests, prefix_tokens)


def draw(loaded: Loaded, num_requests: int, prefix_tokens: int) -> Work:
    prefix = loaded.prompts(1, prefix_tokens)[0]
    return [(prefix + own, OUTPUT_TOKENS) for own in loaded.prompts(num_requests, OWN_TOKENS)]


def first_tokens(engine: Engine, work: Work, together: bool) -> tuple[list[float], float]:
    """Seconds to each first token, and the share of looked-up tokens that the cache had."""
    run = EngineRun(engine)
    for part in [work] if together else [[one] for one in work]:
        run.serve(part)
    queried = sum(s.prefix_queried_tokens for s in run.stats)
    hit = sum(s.prefix_hit_tokens for s in run.stats)
    return run.first_token_seconds(), hit / queried


def host_cost() -> Iterator[tuple[int, float, float]]:
    """(prompt tokens, microseconds a request and step, of these the cache's), with no hits."""
    for num_prompt in PROMPTS:
        on = measure(num_prompt, 1, cache=True, full=True)[2]
        off = measure(num_prompt, 1, cache=False, full=False)[2]
        yield num_prompt, on, on - off


def _report(
    found: dict[tuple[str, str], list[float]],
    hits: Sequence[float],
    num_requests: int,
    prefix_tokens: int,
) -> Report:
    rows: Rows = [("median time to first token", "cache off s", "cache on s", "off / on")]
    targets = []
    for way in WAYS:
        off, on = found[way, "off"], found[way, "on"]
        ratio = statistics.median(a / b for a, b in zip(off, on, strict=True))
        middles = [f"{statistics.median(values):.3f}" for values in (off, on)]
        rows.append((way, *middles, f"{ratio:.1f}"))
        targets.append(Target(f"off / on, {way}", ratio, LEAST_RATIO, at_least=True))
    costs = list(host_cost())
    worst = max(costs, key=lambda cost: cost[2])
    listed = ", ".join(f"{num_prompt}: {cost:.1f}" for num_prompt, _, cost in costs)
    targets.append(
        Target("host time, 0 % hits, a request and step", worst[2], MOST_HOST_MICROSECONDS,
               unit=" us")
    )  # fmt: skip
    return Report(
        "prefix",
        f"{num_requests} requests, {prefix_tokens} shared tokens and {OWN_TOKENS} of their own",
        rows,
        [
            f"share of prompt tokens that the cache had: {statistics.median(hits):.1%}",
            f"host us of the cache with 0 % hits in a full pool, {OUTPUT} output tokens, by "
            f"prompt tokens: {listed}",
        ],
        targets,
        {"first_token_seconds": {f"{way}, {name}": v for (way, name), v in found.items()}},
    )
