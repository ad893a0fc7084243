"""How requests end: stop ids, lengths, aborts, late stop strings, deadlines."""

import itertools
from dataclasses import replace

import pytest

from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.request import Request, Status
from tests.support.scheduler_harness import EOS, LIMITS, Harness, expected_output, make_request


def first_tokens(request: Request, count: int) -> list[int]:
    return expected_output(replace(request, max_tokens=count), 10**6)[0]


def test_eos_ends_with_stop_unless_ignored():
    eos_after = next(
        request for i in itertools.count()
        if EOS in first_tokens(request := make_request(f"r{i}", 3, 30), 10)
    )  # fmt: skip
    index = first_tokens(eos_after, 10).index(EOS)
    for ignore in (False, True):
        request = make_request(eos_after.request_id, 3, 30, ignore_eos=ignore)
        harness = Harness()
        harness.add(request)
        harness.drain()
        assert len(request.output_token_ids) == (30 if ignore else index + 1)
        assert harness.finished[request.request_id][1] == ("length" if ignore else "stop")


def test_stop_token_id_is_reported_and_waits_for_min_tokens():
    tokens = first_tokens(make_request("r", 3, 30), 30)
    stop = tokens[4]
    for min_tokens in (0, 4, 6):
        request = make_request("r", 3, 30, stop_token_ids=(stop,), min_tokens=min_tokens)
        harness = Harness()
        harness.add(request)
        reasons = []
        while harness.scheduler.has_work:
            plan = harness.schedule()
            harness.in_flight.append((plan, harness.run(plan)))
            reasons += [(c.finish_reason, c.stop_reason) for c in harness.commit()]
        end = next((i for i, t in enumerate(tokens) if t == stop and i >= min_tokens), None)
        if end is None:
            assert reasons[-1] == ("length", None)
        else:
            assert request.output_token_ids == tokens[: end + 1]
            assert reasons[-1] == ("stop", stop)
        assert set(reasons[:-1]) <= {(None, None)}


def test_stop_on_the_last_allowed_token_is_stop_not_length():
    stop = first_tokens(make_request("r", 3, 30), 1)[0]
    harness = Harness()
    harness.add(make_request("r", 3, 1, stop_token_ids=(stop,)))
    harness.drain()
    assert harness.finished["r"][1] == "stop"


def test_context_length_ends_with_length():
    harness = Harness(replace(LIMITS, max_model_len=20))
    request = make_request("r", 15, 100)
    harness.add(request)
    harness.drain()
    assert len(request.output_token_ids) == 5
    assert harness.finished["r"][1] == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_frees_everything_from_any_state(steps: int):
    harness = Harness(replace(LIMITS, max_batch_tokens=8))
    request = make_request("r", 13, 10)
    harness.add(request)
    for _ in range(steps):
        harness.step()
    assert harness.scheduler.abort("r") is request
    assert (request.status, request.pages) == (Status.FINISHED, ())
    assert harness.manager.num_used == 0
    harness.scheduler.check_integrity()
    assert harness.scheduler.abort("r") is None
    assert harness.step().is_empty


def test_abort_between_schedule_and_commit_drops_the_row_alone():
    harness = Harness()
    requests = [make_request(name, 9, max_tokens=8) for name in "ab"]
    harness.add(*requests)
    plan = harness.schedule()
    tokens = harness.run(plan)
    harness.scheduler.abort("a")
    del tokens["a"]  # a row whose logits were NaN has no token
    again = make_request("a", 4)  # the same id, used anew at once
    harness.add(again)
    harness.in_flight.append((plan, tokens))
    assert [c.request for c in harness.commit()] == [requests[1]]
    harness.drain()
    harness.check_outputs(requests[1], again)


def test_finish_cuts_the_output_at_the_stop_string():
    harness = Harness()
    request = make_request("r", 5, 20)
    harness.add(request)
    for _ in range(6):
        harness.step()
    expected = request.output_token_ids[:3]
    assert harness.scheduler.finish("r", 3) is request
    assert request.output_token_ids == expected
    assert request.status is Status.FINISHED
    assert harness.manager.num_used == 0
    assert harness.scheduler.finish("r", 3) is None


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_deadline_ends_a_request_in_any_state(steps: int):
    harness = Harness(replace(LIMITS, max_batch_tokens=8))
    request, other = make_request("r", 13, 10), make_request("other", 3, 12)
    request.deadline, other.deadline = 5.0, 100.0
    harness.add(request, other)
    for _ in range(steps):
        harness.step()
    late = harness.schedule()
    tokens = harness.run(late)
    assert harness.scheduler.expire(4.9) == []
    assert harness.scheduler.expire(5.0) == [request]
    assert (request.status, request.pages) == (Status.FINISHED, ())
    harness.scheduler.check_integrity()
    harness.in_flight.append((late, tokens))  # its results in flight are dropped
    assert request not in [news.request for news in harness.commit()]
    assert harness.scheduler.expire(6.0) == []
    harness.drain()
    harness.check_outputs(other)
    assert harness.scheduler.expire(1000.0) == []


def test_deadlines_of_preempted_ended_and_repeated_requests():
    harness = Harness()
    requests = [make_request(name, 5, 20) for name in "abc"]
    for request in requests:
        request.deadline = 7.0
    harness.add(*requests)
    harness.step()
    harness.scheduler.preempt("a")
    harness.scheduler.abort("b")
    again = make_request("b", 5, 20)  # the same id, with no deadline
    harness.add(again)
    assert harness.scheduler.expire(8.0) == [requests[0], requests[2]]
    harness.drain()
    harness.check_outputs(again)


def test_deadlines_of_ended_requests_do_not_pile_up():
    deadlines = Deadlines()
    for i in range(5_000):
        request = make_request(f"{i}", 1)
        request.deadline = 1e9 + i
        deadlines.add(request)
        if i % 100:
            request.status = Status.FINISHED
    assert len(deadlines) < 200
    assert len(deadlines.pop_expired(2e9)) == 50
