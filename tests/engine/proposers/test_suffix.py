"""Suffix decoding: own text and earlier outputs, tenants apart, memory bounded."""

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.proposers.output_history import OutputHistory
from jaxserve.engine.proposers.suffix import SuffixProposer
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams


def make_request(
    name: str, prompt: list[int], output: list[int] | None = None, salt: str = "", adapter: int = 0
) -> Request:
    request = Request(name, tuple(prompt), SamplingParams(), max_tokens=100, seed=0)
    request.cache_salt, request.adapter_id = salt, adapter
    request.output_token_ids += output or []
    return request


def draft(proposer: SuffixProposer, request: Request, limit: int = 8) -> list[int]:
    return proposer.propose([request], [limit])[0]


def finish(proposer: SuffixProposer, request: Request) -> None:
    proposer.propose([request], [0])  # it is known, though nothing is drafted for it
    proposer.forget(request.request_id)


def test_an_earlier_output_is_continued():
    proposer = SuffixProposer()
    finish(proposer, make_request("a", [1], [20, 21, 22, 23, 24, 25]))
    assert draft(proposer, make_request("b", [5, 20, 21, 22])) == [23, 24, 25]
    assert draft(proposer, make_request("c", [5, 20, 21, 22]), 2) == [23, 24]
    assert draft(proposer, make_request("d", [5, 22])) == []  # one token says too little


def test_the_longer_match_counts_and_of_equal_ones_the_own():
    proposer = SuffixProposer()
    finish(proposer, make_request("a", [1], [20, 21, 22, 50, 51]))
    assert draft(proposer, make_request("b", [21, 22, 60, 9, 20, 21, 22]), 1) == [50]
    assert draft(proposer, make_request("c", [20, 21, 22, 60, 9, 20, 21, 22]), 1) == [60]


def test_the_longer_the_match_the_more_is_drafted():
    text = list(range(20, 40))
    proposer = SuffixProposer(spec_factor=1.0)
    finish(proposer, make_request("a", [1], text))
    for length in (2, 3, 5):
        got = draft(proposer, make_request(f"b{length}", [9, *text[:length]]), 30)
        assert got == text[length : 2 * length]
    own = SuffixProposer(spec_factor=2.0)
    assert len(draft(own, make_request("c", [1, 2, 3, 1, 2]), 30)) == 4


@pytest.mark.parametrize("k", [1, 3, 5])
def test_b26_repetitive_texts(k):
    assert draft(SuffixProposer(), make_request("a", [7, 8] * 6), k) == [7, 8, 7, 8, 7][:k]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "x", "y"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 5), min_size=1, max_size=12),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 5), min_size=2, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_drafts_come_from_the_same_salt_and_adapter_only(outputs, prompt):
    """Each group speaks its own tokens, and everybody asks with everybody's texts."""
    groups = [(salt, adapter) for salt in ("", "x", "y") for adapter in (0, 1)]
    proposer = SuffixProposer()
    for i, (salt, adapter, text) in enumerate(outputs):
        mark = 100 * (1 + groups.index((salt, adapter)))
        marked = [token for common in text for token in (common, mark + common)]
        finish(proposer, make_request(str(i), [0], marked, salt, adapter))
    for salt, adapter in groups:
        mark = 100 * (1 + groups.index((salt, adapter)))
        for common in range(6):
            for other in range(1, 7):
                request = make_request(
                    "q", [*prompt, common, 100 * other + common], [], salt, adapter
                )
                for token in draft(proposer, request):
                    assert token < 100 or token // 100 * 100 == mark or token in prompt
                proposer._texts.forget("q")
                proposer._requests.clear()


def test_forget_frees_memory():
    proposer = SuffixProposer(max_outputs=0)
    request = make_request("a", [1, 2, 3, 1, 2], [3])
    draft(proposer, request)
    kept = weakref.ref(request)
    proposer.forget("a")
    proposer.forget("a")
    del request
    gc.collect()
    assert kept() is None
    assert len(proposer._texts) == 0
    assert proposer.history.num_tokens == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=40),
    st.integers(2, 100),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_history_is_bounded(outputs, max_tokens, max_outputs):
    history = OutputHistory(max_tokens, max_outputs)
    for group, length in outputs:
        history.add(group, list(range(length)))
        history.learn(17)
        assert history.num_tokens <= max_tokens
        held = [g for generations in history._groups.values() for g in generations]
        assert history.num_tokens == sum(g.automaton.num_tokens for g in held)
        assert history.num_outputs == sum(g.num_outputs for g in held)
        assert history.num_outputs <= max_outputs + 1
    while history._queue or history._learning:
        history.learn(64)
    assert history.num_tokens <= max_tokens


def test_the_oldest_outputs_and_groups_go_first():
    history = OutputHistory(max_tokens=40, max_outputs=100)
    for group, first in (("a", 0), ("b", 100), ("a", 200), ("a", 300)):
        history.add(group, list(range(first, first + 15)))
    history.learn(1000)
    assert history.draft("b", [100, 101], 3, 1.0, 0.1) == (0, [])  # not used for longest
    assert history.draft("a", [300, 301], 3, 1.0, 0.1) == (2, [302, 303])


def test_learning_takes_as_long_as_it_may():
    history = OutputHistory(max_tokens=1000, max_outputs=10)
    history.add("a", list(range(300)))
    history.learn(64)
    assert history.num_tokens == 64
    history.learn(64)
    assert history.num_tokens == 128


def test_outputs_that_wait_to_be_learned_are_bounded():
    history = OutputHistory(max_tokens=1000, max_outputs=10)
    for _ in range(100):
        history.add("a", [1] * 1000)
    assert history._num_queued <= 1 << 15
