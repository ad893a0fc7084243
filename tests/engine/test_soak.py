"""Twenty thousand short requests of every kind: all end once, and nothing of them stays."""

import gc
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, Status
from jaxserve.errors import QueueFullError
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS
from tests.support.tiny_engine import request, tiny_engine, tiny_model

NUM_REQUESTS = 20_000
SETTLED = 4_000  # requests after which memory has its size
PAGES, HOST_MEMORY = 64, 16 << 10
SMALLEST = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MOST_GROWTH = 24 << 20  # bytes of a process that leaks nothing, by its allocators' habits
LENGTHS = (1, 1, 2, 2, 3, 4, 15)


class Traffic:
    """Submits, aborts, stops late, and keeps the books: what is open, and how everything ended."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.prefixes = [self.ids(self.random.randint(2, 20)) for _ in range(40)]
        self.open: dict[str, Request] = {}
        self.num_submitted = 0
        self.ends = Counter[str]()
        self.preemptions = 0

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(count)]

    def submit(self) -> None:
        """One user request of 1 to 4 choices; now and then under an id that has just been used."""
        rng = self.random
        prompt = [*rng.choice(self.prefixes), *self.ids(rng.choice((0, 0, 1, 3, 8)))]
        params = self.params()
        name = f"r{rng.randrange(60)}" if rng.random() < 0.1 else f"n{self.num_submitted}"
        priority, salt = rng.choice((0, 0, 0, -1, 2)), rng.choice(("", "", "", name))
        deadline = time.monotonic() + rng.choice((-1, 0, 0.002, 9)) if rng.random() < 0.1 else None
        for choice in range(rng.choice((1, 1, 1, 1, 2, 4))):
            item = request(
                f"{name}-{choice}", prompt, params, choice=choice, seed=rng.getrandbits(40)
            )
            if item.request_id in self.open:
                continue
            item.leader_id = f"{name}-0" if choice else None
            item.priority, item.cache_salt, item.deadline = priority, salt, deadline
            item.arrival_time = time.monotonic()
            try:
                self.engine.add(item)
            except QueueFullError:
                continue
            self.open[item.request_id] = item
            self.num_submitted += 1

    def params(self) -> SamplingParams:
        rng = self.random
        penalty = rng.choice((0.0, 0.0, 0.0, 0.0, 0.5))
        stop_ids = tuple(self.ids(rng.choice((0, 0, 1, 4))))
        bias = {EOS: 6.0} if rng.random() < 0.1 else {}
        return SamplingParams(
            temperature=rng.choice((0, 0, 1.0)),
            max_tokens=rng.choice(LENGTHS),
            frequency_penalty=penalty,
            stop_token_ids=stop_ids,
            logit_bias=bias,
            logprobs=2 if rng.random() < 0.02 else None,
        )

    def disturb(self) -> None:
        """An abort, a stop string that is found late, or a preemption, in any state."""
        rng = self.random
        if not self.open or rng.random() < 0.6:
            return
        name = rng.choice(list(self.open))
        if rng.random() < 0.4:
            self.preemptions += self.engine.scheduler.preempt(name) is not None
            return
        if rng.random() < 0.5:
            self.engine.abort(name)
            if rng.random() < 0.2:
                self.engine.abort(name)
            return
        item = self.open.pop(name)
        num_output = len(item.output_token_ids)
        self.engine.finish(name, rng.randint(max(0, num_output - 3), num_output))
        self.ends["stop string"] += 1
        assert item.status is Status.FINISHED

    def step(self) -> None:
        for event in self.engine.step():
            assert event.request_id in self.open, "an event of a request that has ended"
            if event.finish_reason is not None:
                item = self.open.pop(event.request_id)
                assert item.status is Status.FINISHED
                self.ends[event.finish_reason] += 1
                assert event.error is None

    def run(self, num_requests: int) -> None:
        """Submit up to `num_requests` in all and wait for their ends."""
        steps = 0
        while self.num_submitted < num_requests or self.engine.has_work:
            rng = self.random
            if self.num_submitted < num_requests and len(self.open) < 40:
                for _ in range(rng.choice((0, 1, 2, 8))):
                    self.submit()
            self.disturb()
            self.step()
            steps += 1
            if steps % 64 == 0:
                self.engine.check_integrity()
        assert not self.open


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_requests() -> int:
    gc.collect()
    return sum(isinstance(item, Request) for item in gc.get_objects())


@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    engine = tiny_engine(
        tiny_model(**SMALLEST),
        max_batch_rows=16,
        max_queue=64,
        num_pages=PAGES,
        kv_host_memory=HOST_MEMORY,
    )
    engine.scheduler.step_times.swap_is_cheaper = lambda *_: True  # type: ignore[method-assign]
    before = live_requests()
    traffic = Traffic(engine, seed=1)
    traffic.run(SETTLED)
    settled = resident_bytes()
    traffic.run(NUM_REQUESTS)
    grown = resident_bytes() - settled
    assert grown < MOST_GROWTH, f"{grown >> 20} MiB more after {NUM_REQUESTS - SETTLED} requests"
    assert sum(traffic.ends.values()) == traffic.num_submitted >= NUM_REQUESTS
    assert set(traffic.ends) == {"stop", "length", "abort", "timeout", "stop string"}
    assert min(traffic.ends.values()) > 100, traffic.ends
    assert traffic.preemptions > 100
    check_baseline(engine)
    kept = len(engine.scheduler._deadlines)  # ended ones leave by and by
    assert live_requests() - before <= kept + 1, "requests that have ended are still held"


def check_baseline(engine: Engine) -> None:
    """Pages, queues, slots in host memory and of penalties are as if nothing had happened."""
    engine.add(request("last", [1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    while engine.has_work:  # slots of penalties are taken back when something runs
        engine.step()
    engine.check_integrity()
    scheduler, manager = engine.scheduler, engine.kv_manager
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert (manager.num_used, manager.num_free) == (0, PAGES - 1)
    assert manager.stats.stored_pages > 1000 < manager.stats.loaded_pages
    assert not engine._loop._slots._owners
    assert engine._loop._in_flight is None
    assert len(scheduler._deadlines) < 128
    assert not scheduler._queues.siblings.members()
    nodes = list(manager._cache.tree.roots)
    assert len(nodes) <= PAGES + manager.host_pages, "roots that nothing hangs from"
    manager.clear()
    assert manager.num_free == PAGES - 1
    assert not manager._cache.tree.roots
    assert engine.runner.late_compiles == 0
