"""The audit of speculation while it serves: what a step with drafts said, said again without.

Of a sampled share of the steps in which drafts held, one request, drawn by lot, is decoded again
from its last token of before: one token after the other by the program that plain decoding would
have run, with the same settings and noise. It must draw the tokens that the step gave it.

Nothing of that is seen by anybody else. The request runs under a page table of its own: pages that
only the auditor has, behind those the allocator knows of, stand for the ones that are written; the
first of them begins as a copy. Its token counts are in a slot that is the auditor's too. It happens
before the step is committed, so the request is as it was then, and when nothing is in flight, so
the last output on the device is nobody's. It takes as long as plain decoding of these tokens does.
"""

import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from jaxserve.core.buckets import Bucket, most_decode_rows, pick_bucket
from jaxserve.core.step_batch import StepOutput
from jaxserve.engine.batch_builder import InDraw, build_batch, build_sampling
from jaxserve.engine.bursts import MAX_BURST
from jaxserve.engine.engine_shape import EngineShape
from jaxserve.engine.penalty_slots import token_counts
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import Request, Status
from jaxserve.engine.runner import Runner

log = logging.getLogger(__name__)


class DraftAuditor:
    """Audits the steps of one runner, whose pool has shape.audit_pages pages for it. Used by the
    engine's thread, between two steps.

    share: of the steps with accepted drafts. slot: of the runner's sampling state, for its use
    alone.
    """

    def __init__(
        self,
        runner: Runner,
        shape: EngineShape,
        *,
        share: float,
        seed: int,
        slot: int,
        vocab_size: int,
    ) -> None:
        self._runner = runner
        self._shape = shape
        self._share = share
        self._lot = random.Random(seed)
        self._slot = slot
        self._vocab_size = vocab_size

    def audit(
        self,
        plan: Plan,
        output: StepOutput,
        rows: Mapping[str, InDraw],
        buckets: Iterable[Bucket],
    ) -> tuple[int, bool]:
        """(tokens that were compared, whether the last of them differed), of a step with drafts
        that has run and is not committed; (0, False) if it is not in the sample.

        A mismatch is logged. buckets: the shapes that are loaded; the step is audited only if that
        of plain decoding is. Raises whatever XLA does: then the donated pool is lost.
        """
        accepted = np.asarray(output.num_accepted)
        candidates = [
            item
            for item in plan.decode
            if item.drafts and _is_here(item) and accepted[rows[item.request.request_id].row] > 0
        ]
        if not candidates or self._lot.random() >= self._share:
            return 0, False
        buckets = tuple(buckets)
        if most_decode_rows(buckets) < len(plan.decode):
            return 0, False
        item = self._lot.choice(candidates)
        row = rows[item.request.request_id].row
        said = np.asarray(output.tokens)[row, : accepted[row] + 1][:MAX_BURST].tolist()
        bucket = pick_bucket(buckets, len(plan.decode), 0, 0)
        drawn = self._decode(item, len(said), bucket)
        for index, (one, other) in enumerate(zip(said, drawn, strict=True)):
            if one != other:
                _warn(item, index, one, other)
                return index + 1, True
        return len(said), False

    def _decode(self, item: Scheduled, steps: int, bucket: Bucket) -> list[int]:
        """What plain decoding draws for a request, from the token that the step began with."""
        twin, copies = self._twin(item, steps)
        if copies:
            self._runner.copy_pages(copies)
        if twin.sampling_slot:
            self._runner.set_counts(self._slot, *token_counts(twin, self._vocab_size))
        plan = Plan(decode=(Scheduled(twin, item.start, 1, True),), steps=steps)
        batch = build_batch(
            plan,
            bucket,
            num_groups=self._shape.num_groups,
            pages_per_row=self._shape.pages_per_row,
            page_size=self._shape.page_size,
        )
        handle = self._runner.dispatch(bucket, batch, build_sampling(plan, bucket), None, steps)
        return np.asarray(handle.result().tokens)[0, :steps].tolist()

    def _twin(self, item: Scheduled, steps: int) -> tuple[Request, list[tuple[int, int]]]:
        """The request on pages of the auditor from its last token on, and the pages to copy first,
        [(from, to)]."""
        request, size = item.request, self._shape.page_size
        first, last = item.start // size, (item.start + steps - 1) // size
        each = self._shape.audit_pages // self._shape.num_groups
        pages: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        for group, held in enumerate(request.pages):
            own = range(self._shape.num_pages + group * each, self._shape.pool_pages)
            pages.append(held[:first] + list(own[: last - first + 1]))
            if item.start % size:
                copies.append((held[first], own[0]))
        twin = replace(
            request,
            params=replace(request.params, logprobs=None, prompt_logprobs=None),
            pages=tuple(pages),
            sampling_slot=self._slot if request.sampling_slot else 0,
            page_hashes=[],
            prompt_logprobs=[],
            table_rows=None,
        )
        return twin, copies


def _is_here(item: Scheduled) -> bool:
    """Whether the request still has the pages that the step ran on."""
    request = item.request
    return request.status is Status.RUNNING and request.num_preemptions == item.epoch


def _warn(item: Scheduled, index: int, said: int, drawn: int) -> None:
    log.warning(
        "speculation audit: request %s, token %d of its text: the step with drafts said %d, plain "
        "decoding draws %d",
        item.request.request_id,
        item.start + 1 + index,
        said,
        drawn,
    )
