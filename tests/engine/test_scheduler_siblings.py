"""Requests that share a prompt: it is computed once, and nobody waits for ever."""

import itertools
from dataclasses import replace

import pytest

from jaxserve.engine.request import Request
from jaxserve.errors import InvalidRequestError, QueueFullError
from tests.support.scheduler_harness import LIMITS, Harness, ids, make_request


def choices(name: str, count: int, num_prompt: int, max_tokens: int = 6) -> list[Request]:
    """Choices of one request. The fake model is greedy, so all outputs are the same."""
    leader = make_request(name, num_prompt, max_tokens)
    return [leader] + [
        replace(
            leader, request_id=f"{name}-{i}", leader_id=name, choice=i, output_token_ids=[],
            page_hashes=[],
        )
        for i in range(1, count)
    ]  # fmt: skip


def fork(parent: Request, name: str, max_tokens: int | None = None) -> Request:
    return replace(
        parent,
        request_id=name,
        max_tokens=max_tokens or parent.max_tokens,
        output_token_ids=list(parent.output_token_ids),
        pages=(),
        num_computed=0,
        page_hashes=[],
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_is_computed_once_for_all_choices(prefix_cache: bool):
    harness = Harness(prefix_cache=prefix_cache)
    requests = choices("r", 4, 24)
    harness.add(*requests)
    first = harness.step()
    assert [(i.request.request_id, i.num_tokens) for i in first.prefill] == [("r", 24)]
    second = harness.step()
    assert ids(second.decode) == ["r", "r-1", "r-2", "r-3"]  # 23 tokens shared, one run again
    assert not second.prefill
    full_pages = {tuple(request.pages[0][:5]) for request in requests}
    last_pages = {request.pages[0][5] for request in requests}
    assert (len(full_pages), len(last_pages)) == (1, 4)
    assert [request.num_cached_tokens for request in requests] == [0, 23, 23, 23]
    harness.drain()
    harness.check_outputs(*requests)


@pytest.mark.parametrize("max_chunk", [None, 16, 7, 1])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [200, 16])
@pytest.mark.parametrize("windows", [(None,), (9, None, 9)])
def test_choices_end_alike_whatever_is_in_their_way(
    max_chunk: int | None, depth: int, num_pages: int, windows: tuple[int | None, ...]
):
    limits = replace(LIMITS, max_chunk=max_chunk, max_batch_tokens=16, max_prefill_rows=2)
    harness = Harness(limits, num_pages=num_pages * len(windows), windows=windows, depth=depth)
    requests = [*choices("a", 4, 30), *choices("b", 3, 9), make_request("c", 11)]
    harness.add(*requests)
    harness.drain()
    harness.check_outputs(*requests)


def test_others_enter_while_a_choice_waits_for_its_prompt():
    harness = Harness(replace(LIMITS, max_batch_tokens=8))
    family = choices("r", 2, 20)
    harness.add(*family, make_request("other", 4))
    harness.step()
    harness.step()
    third = harness.step()
    assert ids(third.prefill) == ["r", "other"]
    assert ids(harness.scheduler.waiting) == ["r-1"]
    assert ids(harness.step().decode) == ["r", "other", "r-1"]


def test_without_its_leader_the_next_choice_computes_the_prompt():
    for stop in ("abort", "preempt", "finish early"):
        harness = Harness(replace(LIMITS, max_batch_tokens=8))
        requests = choices("r", 3, 20, max_tokens=1 if stop == "finish early" else 6)
        harness.add(*requests)
        harness.step()
        if stop == "abort":
            harness.scheduler.abort("r")
            assert ids(harness.step().prefill) == ["r-1"]
            assert ids(harness.scheduler.waiting) == ["r-2"]
        elif stop == "preempt":
            harness.scheduler.preempt("r")
            assert ids(harness.step().prefill) == ["r"]  # it came first
        harness.drain()
        harness.check_outputs(*[r for r in requests if r.request_id in harness.finished])
        assert len(harness.finished) == 3 - (stop == "abort")


def test_choices_wait_for_a_page_like_everybody():
    """Each choice needs one page of its own when its prompt is shared."""
    harness = Harness(num_pages=12, page_size=4)
    requests = choices("r", 4, 31, max_tokens=2)
    harness.add(*requests)
    harness.step()
    assert ids(harness.step().decode) == ["r", "r-1", "r-2", "r-3"]
    assert harness.manager.num_used == 7 + 3  # the leader had one token to go
    harness.drain()
    harness.check_outputs(*requests)


def test_a_leader_that_ended_long_ago_is_not_waited_for():
    harness = Harness()
    late = choices("r", 2, 12)[1]
    harness.add(late)
    assert ids(harness.step().prefill) == ["r-1"]
    harness.drain()
    harness.check_outputs(late)


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_fork_goes_on_like_its_parent(steps: int, prefix_cache: bool, depth: int):
    limits = replace(LIMITS, max_batch_tokens=16)
    harness = Harness(limits, prefix_cache=prefix_cache, depth=depth)
    parent = make_request("parent", 23, 12)
    harness.add(parent)
    for _ in range(steps):
        harness.step()
    children = [fork(parent, f"child{i}", 14 - i) for i in range(3)]
    for child in children:
        harness.scheduler.fork("parent", child)
        harness.scheduler.check_integrity()
    harness.drain()
    harness.check_outputs(parent, *children)
    assert len(children[0].output_token_ids) == 14


def test_a_fork_shares_what_its_parent_has_computed():
    harness = Harness()
    parent = make_request("parent", 10, 30)
    harness.add(parent)
    for _ in range(9):
        harness.step()
    assert parent.num_tokens == 19
    child = fork(parent, "child")
    harness.scheduler.fork("parent", child)
    plan = harness.step()
    assert ids(plan.decode) == ["parent", "child"]
    assert child.pages[0][:4] == parent.pages[0][:4]
    assert child.pages[0][4] != parent.pages[0][4]  # written by both from here on
    assert child.num_computed == parent.num_computed == 19
    harness.drain()
    harness.check_outputs(parent, child)


def test_a_fork_of_a_preempted_request_waits_its_turn():
    harness = Harness()
    parent = make_request("parent", 10, 30)
    harness.add(parent)
    for _ in range(9):
        harness.step()
    harness.scheduler.preempt("parent")
    child = fork(parent, "child")
    harness.scheduler.fork("parent", child)
    assert ids(harness.step().prefill) == ["parent"]
    assert ids(harness.step().decode) == ["parent", "child"]
    harness.drain()
    harness.check_outputs(parent, child)


def test_forks_that_cannot_be_are_refused_and_change_nothing():
    harness = Harness(replace(LIMITS, max_queue=1, max_batch_rows=1))
    parent = make_request("parent", 10, 3)
    harness.add(parent)
    harness.step()
    with pytest.raises(InvalidRequestError, match="'nobody' cannot be forked"):
        harness.scheduler.fork("nobody", fork(parent, "child"))
    with pytest.raises(InvalidRequestError, match="'parent' is in use"):
        harness.scheduler.fork("parent", fork(parent, "parent"))
    with pytest.raises(InvalidRequestError, match="has 1 output tokens and may have 1"):
        harness.scheduler.fork("parent", fork(parent, "child", max_tokens=1))
    harness.scheduler.fork("parent", fork(parent, "child"))
    with pytest.raises(QueueFullError):
        harness.scheduler.fork("parent", fork(parent, "another"))
    harness.drain()
    with pytest.raises(InvalidRequestError, match="unknown or has ended"):
        harness.scheduler.fork("parent", fork(parent, "late"))
    harness.scheduler.check_integrity()


def test_a_beam_of_forks_of_forks_shares_a_tree():
    harness = Harness(replace(LIMITS, max_batch_rows=16))
    beam = [make_request("0", 9, 40)]
    harness.add(*beam)
    for depth in range(3):
        for _ in range(4):
            harness.step()
        for parent in list(beam):
            child = fork(parent, f"{parent.request_id}.{depth}")
            harness.scheduler.fork(parent.request_id, child)
            beam.append(child)
    harness.step()
    assert len(beam) == harness.scheduler.num_running == 8
    pages = set(itertools.chain(*(request.pages[0] for request in beam)))
    assert harness.manager.num_used == len(pages) < 4 + 2 * 8
    harness.drain()
    harness.check_outputs(*beam)
