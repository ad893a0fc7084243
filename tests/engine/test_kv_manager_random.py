"""Random operations on a KV manager over a simulated pool: every hit holds the right tokens."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.kv_operations import WINDOWS, KVOperations


class ManagerMachine(RuleBasedStateMachine):
    """The operations, in an order and with choices that shrink when one fails."""

    operations: KVOperations | None = None

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 5]),
        windows=st.sampled_from(WINDOWS),
        num_pages=st.integers(12, 40),
        host_pages=st.sampled_from([0, 1, 3, 20]),
        max_chunk=st.integers(1, 9),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def create(self, **options: object) -> None:
        self.operations = KVOperations(lambda _: 0, **options)

    @rule(
        data=st.data(),
        names=st.lists(
            st.sampled_from(
                ["submit", "submit", "submit_follow_up", "step", "step", "step", "commit", "commit",
                 "finish", "preempt", "discard", "swap", "clear"]
            ),
            min_size=1, max_size=10,
        ),
    )  # fmt: skip
    def operate(self, data: st.DataObject, names: list[str]) -> None:
        assert self.operations is not None
        self.operations.choose = lambda n: data.draw(st.integers(0, n - 1))
        for name in names:
            getattr(self.operations, name)()

    def teardown(self) -> None:
        if self.operations is not None:
            self.operations.end_all()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=10, deadline=None)

NAMES = Counter(submit=6, submit_follow_up=4, step=10, commit=9, finish=2, preempt=1)
RARE = ("discard", "swap", "clear")


def run_long(seed: int, num_operations: int) -> Counter[str]:
    """Random operations without shrinking, and so many more of them; returns what happened."""
    generator = random.Random(seed)
    operations = KVOperations(
        generator.randrange,
        page_size=generator.choice([1, 2, 4, 4, 5]),
        windows=generator.choice(WINDOWS),
        num_pages=generator.randrange(12, 60),
        host_pages=generator.choice([0, 1, 3, 20, 40]),
        max_chunk=generator.randrange(1, 10),
        prefix_cache=generator.random() < 0.85,
    )
    names = list(NAMES.elements())
    for _ in range(num_operations):
        name = generator.choice(RARE if generator.random() < 0.01 else names)
        getattr(operations, name)()
    operations.end_all()
    stats = operations.simulation.manager.stats
    return Counter(vars(stats))


def test_long_runs():
    """Thousands of operations; each kind of event happens in them."""
    happened = Counter[str]()
    for seed in range(12):
        happened += run_long(seed, 400)
    for event in ("hit_tokens", "evicted_pages", "stored_pages", "loaded_pages", "copied_pages"):
        assert happened[event] > 100, happened


@pytest.mark.slow
def test_longer_runs():
    for seed in range(1000, 1040):
        run_long(seed, 1000)
