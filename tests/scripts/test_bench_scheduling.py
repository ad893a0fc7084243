"""The scheduling benchmark's parts that take no model: exact runs of the real scheduler."""

import math
import statistics

import pytest

from jaxserve.core.buckets import Bucket
from jaxserve.engine.plan import Plan
from jaxserve.engine.step_times import StepTimes
from scripts.scheduling import batching, mixed_trace, overlap, prefix, stall, waste
from scripts.scheduling.simulation import Simulation, make_limits, make_request
from scripts.scheduling.verdicts import Report, Target


def test_the_trace_is_what_its_rule_draws():
    trace = mixed_trace.read()
    assert trace == list(mixed_trace.draw())
    prompts, outputs = zip(*trace, strict=True)
    assert (min(prompts) >= 20, max(prompts) <= 2000) == (True, True)
    assert (min(outputs) >= 10, max(outputs) <= 500) == (True, True)
    assert max(prompts) > 1500
    assert min(prompts) < 30


def test_pages_waste_half_a_page_a_request_and_contiguous_memory_far_more():
    usage = waste.run_trace(mixed_trace.read(), waste.PAGE_SIZE)
    assert usage.share <= waste.bound(usage, waste.PAGE_SIZE)
    assert usage.share + usage.pending / usage.held < waste.MOST_WASTE
    for reserved in usage.reserved.values():
        assert 1 - usage.tokens / reserved > 10 * usage.share


def test_a_tight_pool_that_preempts_wastes_as_little():
    trace = mixed_trace.read()[:60]
    usage = waste.run_trace(trace, waste.PAGE_SIZE, num_pages=200)
    assert usage.share <= 1.2 * waste.bound(usage, waste.PAGE_SIZE)


def test_continuous_batches_fill_the_slots_that_static_ones_leave_empty():
    outputs = batching.draw(160)
    continuous, static = (batching.simulate(outputs, way) for way in ("continuous", "static"))
    assert static.steps / continuous.steps >= 2.2
    assert continuous.utilisation >= 0.87
    assert static.utilisation <= 0.42
    ideal = (sum(outputs) - len(outputs)) / continuous.rows
    assert ideal / continuous.steps >= 0.87


def test_a_static_batch_lasts_as_long_as_its_longest_request():
    outputs = [3, 9, 5, 4, 7, 2]
    # 3 requests: a prompt step, and a decode step for every further token of the longest one; a
    # step that plans for nobody, because the last tokens are in flight, is not counted.
    assert batching.simulate(outputs, "static", rows=3).steps == 9 + 7


class Device:
    """Prices like those measured of SmolLM2 on a CPU: a padded token costs arithmetic, a pair of
    tokens too, and a chunk reads all keys and values before it once."""

    def __init__(self, token: float = 2.1, pair: float = 0.001, read: float = 0.013) -> None:
        self.token, self.pair, self.read = token, pair, read

    def __call__(self, plan: Plan, bucket: Bucket) -> float:
        """Milliseconds; 80 for a decode step."""
        contexts = sum(item.start for item in plan.prefill)
        attention = self.pair * plan.num_prefill_pairs + self.read * contexts
        return 80 + (10 if plan.prefill else 0) + self.token * bucket.prefill_tokens + attention


def gaps(
    device: Device, long_prompt: int, step_times: StepTimes | None = None, max_tokens: int = 512
) -> tuple[float, float]:
    """Median gap of 8 streams before a long prompt arrives, and the worst one while it runs."""
    simulation = Simulation(make_limits(16, max_tokens), device, step_times=step_times)
    simulation.add(make_request(100, 6000, f"stream {i}") for i in range(8))
    before, after = [], []
    last, steps = 0.0, 0
    for _ in simulation.steps():
        names = {news.request.request_id for _, news in simulation.committed}
        if "stream 0" in names:
            (after if steps > 40 else before).append(simulation.now - last)
            last = simulation.now
            steps += 1
        if steps == 40 and not after:
            simulation.add([make_request(long_prompt, 1, "long")])
            steps += 1
        if "long" in names:
            return statistics.median(before), max(after)
        simulation.committed.clear()
    raise AssertionError("the long prompt never had its first token")


@pytest.mark.parametrize(
    "device",
    [Device(), Device(token=0.05, pair=1e-5, read=1e-4), Device(pair=0.003, read=0.002)],
    ids=["cpu", "gpu", "slow attention"],
)
def test_a_long_prompt_stalls_nobody(device: Device):
    median, worst = gaps(device, 6000)
    assert median == 80
    assert worst <= stall.MOST_STALL * median


def test_a_newcomer_with_a_long_cached_prefix_stalls_nobody():
    """Its few tokens come after thousands, so each costs as much as many."""
    simulation = Simulation(make_limits(16), Device(), prefix_cache=True)
    first = make_request(4000, 1, "first")
    again = make_request(0, 1, "again")
    again.prompt_token_ids = first.prompt_token_ids[:3900] + tuple(range(200))
    simulation.add([make_request(100, 5000, "stream")])
    slowest = 0.0
    for number, step in enumerate(simulation.steps()):
        if number == 20:
            simulation.add([first])
        names = {news.request.request_id for _, news in simulation.committed}
        if "first" in names and again.arrival_time == 0:
            again.arrival_time = simulation.now
            simulation.add([again])
        slowest = max(slowest, step.seconds) if again.arrival_time else 0.0
        if "again" in names:
            break
        simulation.committed.clear()
    assert again.num_cached_tokens == 3900
    assert slowest <= stall.MOST_STALL * 80


def test_without_predicted_time_and_without_chunks_streams_stall():
    median, chunks = gaps(Device(), 1500, stall.NoTimeLimit())
    assert chunks > 10 * median
    median, whole = gaps(Device(), 1500, stall.NoTimeLimit(), max_tokens=1500)
    assert whole > 2 * chunks


def test_the_interval_of_paired_ratios():
    low, mean, high = overlap.interval([0.9, 0.9 * 1.1, 0.9 / 1.1])
    half = 4.30 * math.log(1.1) / math.sqrt(3)
    assert mean == pytest.approx(0.9)
    assert (low, high) == pytest.approx((0.9 * math.exp(-half), 0.9 * math.exp(half)))
    assert overlap.interval([0.9])[2] == math.inf


def test_a_report_says_what_was_reached():
    report = Report("item", "about", [("", "value"), ("row", "1.0")], ["a note"])
    report.targets += [Target("small", 2.0, 3.0), Target("large", 2.0, 3.0, at_least=True)]
    lines = report.text().splitlines()
    assert lines[:4] == ["item: about", "     value", "row    1.0", "a note"]
    assert lines[4].endswith("<= 3 reached")
    assert lines[5].endswith(">= 3 MISSED")
    assert [target["reached"] for target in report.as_json()["targets"]] == [True, False]


@pytest.mark.slow
def test_the_cache_costs_little_when_it_never_hits():
    """Generous: the benchmark's limit is 20 us, on a machine with nothing else to do."""
    assert max(cost for _, _, cost in prefix.host_cost()) < 5 * prefix.MOST_HOST_MICROSECONDS
