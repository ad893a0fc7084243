"""Drafts of a smaller model with the same vocabulary: it decodes ahead, and the target verifies.

Its keys and values lie in a pool of its own under the target's page ids: a page holds the same
tokens in both, so one allocator serves both, and whoever shares, forks or is sent back needs
nothing new. What the draft model has not seen of a request (its prompt, or tokens drawn while
nothing was drafted) it runs first, a bounded number of tokens in a call.

It draws as the request does, with the noise that the target uses at the same positions, so sampled
requests accept what both would have drawn; penalties are the target's alone. It runs one step more
than it drafts, for the keys and values of its last draft. Its failures cost drafts, nothing else.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.core.buckets import Bucket, first_bucket, pick_bucket
from jaxserve.core.step_batch import SamplingBatch, StepBatch
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request
from jaxserve.engine.runner import Runner

log = logging.getLogger(__name__)

MOST_DRAFTS = MAX_BURST - 1
_MOST_FAILURES = 3  # in a row; then it is left alone


@dataclass(eq=False)
class _View:
    """A request as the draft model sees it: same tokens, the pages of one table group.

    own.num_computed counts the draft model's keys and values. drafted: what it wrote behind the
    first `known` tokens, right or wrong.
    """

    request: Request
    own: Request
    known: int = 0
    drafted: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Drives one runner. reserve: lets a request's pages cover so many tokens, if there are free
    ones (`Scheduler.reserve`)."""

    name = "draft-model"

    def __init__(
        self,
        runner: Runner,
        shape: EngineShape,
        table_group: int,
        reserve: Callable[[str, int], bool],
    ) -> None:
        """shape: the target's; table_group: its group without a window, whose pages are used."""
        self._runner = runner
        self._shape = shape
        self._group = table_group
        self._reserve = reserve
        self._views: dict[str, _View] = {}
        self._failures = 0

    def load(self) -> None:
        """Compile what it runs: decode steps of every size, and two sizes of prompt chunks."""
        table = self._shape.buckets
        mixed = [bucket for bucket in table if bucket.prefill_tokens]
        decode = [b for b in table if b.width == 1 and not b.prefill_tokens]
        self._runner.load([*decode, *dict.fromkeys((first_bucket(table), mixed[-1]))], self._inputs)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        """See Proposer. None before `load`, and for who has more to catch up with than a call."""
        drafts: list[list[int]] = [[] for _ in requests]
        if not self._runner.buckets or self._failures >= _MOST_FAILURES:
            return drafts
        most = [min(limit, MOST_DRAFTS) for limit in limits]
        try:
            wanted = [
                (place, self._view(request))
                for place, request in enumerate(requests)
                if most[place] > 0
                and self._reserve(request.request_id, request.num_tokens + most[place])
            ]
            self._catch_up([view for _, view in wanted])
            ready = [
                (place, view)
                for place, view in wanted
                if view.own.num_computed == view.own.num_tokens - 1
            ]
            if ready:
                found = self._decode([view for _, view in ready], max(most) + 1)
                for (place, _), tokens in zip(ready, found, strict=True):
                    drafts[place] = tokens[: most[place]]
            self._failures = 0
        except Exception:  # whatever XLA raises: its pool is lost, the target's is not
            self._failures += 1
            log.exception("the draft model failed (%d in a row); no drafts now", self._failures)
            self._views.clear()
            self._runner.reset()
        return drafts

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        """Nothing to learn: which drafts held, the text says."""

    def forget(self, request_id: str) -> None:
        self._views.pop(request_id, None)

    def _view(self, request: Request) -> _View:
        view = self._views.get(request.request_id)
        if view is None or view.request is not request:
            params = replace(
                request.params,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                logprobs=None,
                prompt_logprobs=None,
            )
            own = replace(request, params=params, page_hashes=[], prompt_logprobs=[])
            own.output_token_ids = request.output_token_ids  # the same list: it grows
            own.num_computed, own.table_rows, own.sampling_slot = 0, None, 0
            view = self._views[request.request_id] = _View(request, own)
        own = view.own
        if own.num_preemptions != request.num_preemptions:  # it has other pages now
            own.num_preemptions, own.num_computed, view.drafted = request.num_preemptions, 0, []
        own.pages = (request.pages[self._group],)
        if view.drafted:  # right as far as the text went on like that
            text = own.token_ids(view.known, own.num_tokens)
            right = 0
            while right < min(len(text), len(view.drafted)) and text[right] == view.drafted[right]:
                right += 1
            own.num_computed, view.drafted = view.known + right, []
        own.num_computed = min(own.num_computed, own.num_tokens - 1)
        return view

    def _catch_up(self, views: Sequence[_View]) -> None:
        """Run tokens that the draft model has not seen: one step at most."""
        mixed = [bucket for bucket in self._runner.buckets if bucket.prefill_tokens]
        if not mixed:
            return
        largest = max(mixed, key=lambda bucket: bucket.prefill_tokens)
        budget = largest.prefill_tokens
        items: list[Scheduled] = []
        for view in views:
            own = view.own
            size = min(own.num_tokens - 1 - own.num_computed, budget)
            if size > 0 and len(items) < largest.prefill_rows:
                items.append(Scheduled(own, own.num_computed, size, False))
                own.num_computed += size
                budget -= size
        if items:
            plan = Plan(prefill=tuple(items))
            bucket = pick_bucket(self._runner.buckets, 0, len(items), plan.num_prefill_tokens)
            self._runner.dispatch(bucket, *self._inputs(bucket, plan))

    def _decode(self, views: Sequence[_View], steps: int) -> list[list[int]]:
        """What the draft model goes on with: steps - 1 tokens of each."""
        plan = Plan(
            decode=tuple(Scheduled(view.own, view.own.num_computed, 1, True) for view in views),
            steps=steps,
        )
        bucket = pick_bucket(self._runner.buckets, len(views), 0, 0)
        batch, sampling = self._inputs(bucket, plan)
        output = self._runner.dispatch(bucket, batch, sampling, None, steps).result()
        drafts = np.asarray(output.tokens)[: len(views), : steps - 1].tolist()
        for view, tokens in zip(views, drafts, strict=True):
            view.known, view.drafted = view.own.num_tokens, tokens
        return drafts

    def _inputs(self, bucket: Bucket, plan: Plan | None = None) -> tuple[StepBatch, SamplingBatch]:
        plan = plan or Plan()
        batch = build_batch(
            plan,
            bucket,
            num_groups=1,
            pages_per_row=self._shape.pages_per_row,
            page_size=self._shape.page_size,
        )
        return batch, build_sampling(plan, bucket)
