"""What the speculator asks its proposer, and when: no engine, and nothing is run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.core.buckets import bucket_table, pick_bucket
from jaxserve.core.step_batch import StepOutput
from jaxserve.engine.batch_builder import InDraw
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.proposers.control import DraftControl
from jaxserve.engine.request import Request, Status
from jaxserve.engine.speculator import Speculator
from jaxserve.sampling_params import SamplingParams

TABLE = bucket_table(64, 64, 8)  # 64 rows: no drafts; 16: 4 at most


class Asked:
    """Notes what it was asked and told."""

    name = "asked"

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.drawn: list[tuple[Any, ...]] = []

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        self.limits += limits
        return [[1] * limit for limit in limits]

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        pass

    def observe_drawn(self, *told: Any) -> None:
        self.drawn.append(told)

    def forget(self, request_id: str) -> None:
        pass


def running(count: int, **params: Any) -> list[Request]:
    requests = [
        Request(f"r{i}", (1, 2, 3), SamplingParams(**params), max_tokens=50, seed=0)
        for i in range(count)
    ]
    for request in requests:
        request.status, request.num_computed = Status.RUNNING, 2
    return requests


def speculator(proposer: Asked, **control: Any) -> Speculator:
    widths = sorted({bucket.width for bucket in TABLE})
    rows = sorted({bucket.decode_rows for bucket in TABLE})
    return Speculator(proposer, DraftControl(widths, rows, **control), 8, TABLE)


def plain_step(one: Speculator, requests: Sequence[Request]) -> None:
    plan = Plan(decode=tuple(Scheduled(item, 2, 1, True) for item in requests))
    rows = {item.request_id: InDraw(row, 1) for row, item in enumerate(requests)}
    count = len(requests)
    nothing: Any = None
    output = StepOutput(
        np.ones((count, 8), np.int32), np.zeros(count, np.int32), np.ones(count, bool), nothing
    )
    for item in requests:
        item.output_token_ids.append(1)
    one.observe(plan, output, rows, pick_bucket(TABLE, count, 0, 0), 0.01, drafting=False)


@pytest.mark.parametrize(
    ("count", "params", "control", "most"),
    [
        (1, {}, {}, 8),
        (16, {}, {}, 2),
        (17, {}, {}, 0),
        (40, {}, {}, 0),
        (1, {"num_speculative_tokens": 0}, {}, 0),
        (1, {"num_speculative_tokens": 3}, {}, 3),
        (4, {}, {"disable_by_batch_size": 4}, 0),
        (3, {}, {"disable_by_batch_size": 4}, 8),
    ],
)
def test_guesses_are_asked_for_only_where_drafts_could_run(
    count: int, params: dict[str, Any], control: dict[str, Any], most: int
) -> None:
    proposer = Asked()
    one = speculator(proposer, **control)
    requests = running(count, **params)
    for _ in range(3):
        plain_step(one, requests)
    # Where none can run a request is named once, for whoever learns from its output at its end.
    assert proposer.limits == [most] * (3 * count if most else count)


def test_all_draws_of_a_step_with_drafts_are_told() -> None:
    proposer = Asked()
    one = speculator(proposer)
    requests = running(2)
    plan = Plan(
        decode=(
            Scheduled(requests[0], 2, 4, True, drafts=(7, 8, 9)),
            Scheduled(requests[1], 2, 1, True),
        )
    )
    rows = {"r0": InDraw(0, 4), "r1": InDraw(1, 1)}
    tokens = np.array([[7, 5, 6, 4, 0], [3, 0, 0, 0, 0]], np.int32)
    nothing: Any = None
    output = StepOutput(tokens, np.array([1, 0]), np.ones(2, bool), nothing)
    requests[0].output_token_ids += [7, 5]
    requests[1].output_token_ids.append(3)
    one.observe(plan, output, rows, pick_bucket(TABLE, 2, 0, 0, 4), 0.01, drafting=True)
    assert proposer.drawn == [("r0", 3, (7, 8, 9), [7, 5, 6, 4])]
