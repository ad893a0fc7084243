"""Drafts of a smaller model with the same vocabulary: it decodes ahead, and the target verifies.

It runs one step more than it drafts, for the keys and values of its last draft.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.core.buckets import Bucket, first_bucket, pick_bucket
from jaxserve.core.step_batch import SamplingBatch, StepBatch
from jaxserve.engine.batch_builder import build_batch, build_sampling
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.proposers.device_proposer import View
from jaxserve.engine.runner import Runner


class DraftModel:
    """A `Drafter` over a runner of the draft model. shape: the target's."""

    name = "draft-model"
    most_drafts = MAX_BURST - 1
    most_pending = 1
    first_token = 0

    def __init__(self, runner: Runner, shape: EngineShape) -> None:
        self._runner = runner
        self._shape = shape

    @property
    def is_loaded(self) -> bool:
        return bool(self._runner.buckets)

    @property
    def prompt_shape(self) -> tuple[int, int] | None:
        """Of the largest step with prompts that is loaded."""
        mixed = [bucket for bucket in self._runner.buckets if bucket.prefill_tokens]
        if not mixed:
            return None
        largest = max(mixed, key=lambda bucket: bucket.prefill_tokens)
        return largest.prefill_rows, largest.prefill_tokens

    def load(self) -> None:
        """Compile what it runs: decode steps of every size, and two sizes of prompt chunks."""
        table = self._shape.buckets
        mixed = [bucket for bucket in table if bucket.prefill_tokens]
        decode = [b for b in table if b.width == 1 and not b.prefill_tokens]
        self._runner.load([*decode, *dict.fromkeys((first_bucket(table), mixed[-1]))], self._inputs)

    def run_prompts(self, plan: Plan) -> None:
        """See Drafter."""
        bucket = pick_bucket(self._runner.buckets, 0, len(plan.prefill), plan.num_prefill_tokens)
        self._runner.dispatch(bucket, *self._inputs(bucket, plan))

    def draft(self, views: Sequence[View], most: Sequence[int]) -> list[list[int]]:
        """See Drafter: what the draft model goes on with, as many tokens of each."""
        steps = max(most) + 1
        plan = Plan(
            decode=tuple(Scheduled(view.own, view.own.num_computed, 1, True) for view in views),
            steps=steps,
        )
        bucket = pick_bucket(self._runner.buckets, len(views), 0, 0)
        batch, sampling = self._inputs(bucket, plan)
        output = self._runner.dispatch(bucket, batch, sampling, None, steps).result()
        drafts: list[list[int]] = np.asarray(output.tokens)[: len(views), : steps - 1].tolist()
        for view, tokens in zip(views, drafts, strict=True):
            view.known, view.drafted = view.own.num_tokens, tokens
        return drafts

    def reset(self) -> None:
        """See Drafter."""
        self._runner.reset()

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
