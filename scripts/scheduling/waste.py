"""How much of the KV memory that requests hold is not used: pages against contiguous reservation.

The mixed trace runs through the real scheduler and KV manager. In every step, all places for tokens
that running requests hold are counted, and those of them without a token:

- *unused*: behind the last token that a request has, what the metric `kv_cache_waste_tokens` says.
  Only the last page of a request has such places, (page_size - 1) / 2 of them if its length is as
  likely to end anywhere in a page;
- *not run yet*: for prompt tokens that later steps will run. They are reserved at admission, so
  that a prompt that has begun is never stopped by newcomers, and are nobody's waste for long.

Contiguous reservation, for the same requests at the same moments: max_model_len places each, or
prompt + max_tokens, which here is exactly what the request will need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.scheduling.mixed_trace import Lengths, read
from scripts.scheduling.simulation import Simulation, constant_price, make_limits, make_request
from scripts.scheduling.verdicts import Report, Rows, Target

MOST_WASTE = 0.04
PAGE_SIZE = 16
ROWS = 16
MAX_MODEL_LEN = 4096  # of the reservation by it; the longest request of the trace takes 2,500


@dataclass
class Usage:
    """Sums over steps, of all running requests."""

    held: int = 0  # places in pages
    unused: int = 0
    pending: int = 0  # places for prompt tokens not run yet
    requests: int = 0
    reserved: dict[str, int] = field(default_factory=lambda: {"max": 0, "known": 0})

    @property
    def tokens(self) -> int:
        return self.held - self.unused

    @property
    def mean_length(self) -> float:
        return self.tokens / self.requests

    @property
    def share(self) -> float:
        return self.unused / self.held


def run_trace(
    trace: Sequence[Lengths], page_size: int, rows: int = ROWS, num_pages: int = 1 << 16
) -> Usage:
    """All requests of the trace, at most `rows` at once."""
    simulation = Simulation(
        make_limits(rows), constant_price, num_pages=num_pages, page_size=page_size
    )
    simulation.add(make_request(*lengths) for lengths in trace)
    manager, scheduler = simulation.manager, simulation.scheduler
    usage = Usage()
    for step in simulation.steps():
        running = scheduler.running
        usage.held += manager.num_used * page_size
        usage.unused += manager.unused_places(running)
        usage.requests += len(running)
        for request in running:
            num_prompt = len(request.prompt_token_ids)
            usage.pending += max(0, num_prompt - request.num_computed)
            usage.reserved["max"] += MAX_MODEL_LEN
            usage.reserved["known"] += num_prompt + request.max_tokens
        usage.pending -= step.plan.num_prefill_tokens
    return usage


def bound(usage: Usage, page_size: int) -> float:
    """((page_size - 1) / 2) / mean length of a running request."""
    return (page_size - 1) / 2 / usage.mean_length


def run() -> Report:
    trace = read()
    usages = {size: run_trace(trace, size) for size in (8, PAGE_SIZE, 32)}
    usage = usages[PAGE_SIZE]
    rows: Rows = [("", "places held", "unused", "share", "bound")]
    for size, one in usages.items():
        share = (f"{one.share:.2%}", f"{bound(one, size):.2%}")
        rows.append((f"pages of {size}", f"{one.held:,}", f"{one.unused:,}", *share))
    for name, key in (
        (f"contiguous, max_model_len {MAX_MODEL_LEN}", "max"),
        ("contiguous, prompt + max_tokens", "known"),
    ):
        held = usage.reserved[key]
        unused = held - usage.tokens
        rows.append((name, f"{held:,}", f"{unused:,}", f"{unused / held:.2%}", ""))
    return Report(
        "waste",
        f"{len(trace)} requests of the mixed trace, {ROWS} rows, summed over steps",
        rows,
        [
            f"mean length of a running request: {usage.mean_length:.0f} tokens; "
            f"places for prompt tokens that were not run yet: {usage.pending / usage.held:.2%}"
        ],
        [
            Target("unused share at page size 16", usage.share, bound(usage, PAGE_SIZE)),
            Target("unused share at page size 16", usage.share, MOST_WASTE),
        ],
    )
