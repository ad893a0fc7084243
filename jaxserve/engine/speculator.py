"""Speculation between two steps: who gets how many drafts, and what came of them.

Drafts follow the last token a request has, so they can only be made once that is known: while
the control says that some may pay, the loop commits a step before it plans the next. Otherwise, and
whenever nobody has drafts, decoding is what it is without speculation, bursts included.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxserve.core.buckets import Bucket, widest
from jaxserve.core.step_batch import StepOutput
from jaxserve.engine.batch_builder import InDraw
from jaxserve.engine.draft_audit import DraftAuditor
from jaxserve.engine.plan import Drafts, Plan
from jaxserve.engine.proposers.acceptance import judge
from jaxserve.engine.proposers.base import LearnsFromDraws, Proposer
from jaxserve.engine.proposers.control import DraftControl
from jaxserve.engine.proposers.host_proposers import make_host_proposer
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.engine.request import Request, Status
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError
from jaxserve.speculative_config import SpeculativeConfig


class Speculator:
    """One proposer, how much it may propose, and what it achieved. Used by the engine's thread."""

    def __init__(
        self,
        proposer: Proposer,
        control: DraftControl,
        num_drafts: int,
        table: Sequence[Bucket],
        *,
        drafts_are_free: bool = True,
        auditor: DraftAuditor | None = None,
    ) -> None:
        """num_drafts: the most that a request may have in a step. table: all shapes that steps may
        have. drafts_are_free: proposing takes no time that counts. auditor: None: nothing is
        audited."""
        self._drafts_are_free = drafts_are_free
        self.stats = SpeculationStats()  # since the start
        self._told = self.stats.copy()
        self._auditor = auditor
        self._table = tuple(table)
        self._proposer = proposer
        self._learner = proposer if isinstance(proposer, LearnsFromDraws) else None
        self._control = control
        self._num_drafts = num_drafts
        self._guesses: dict[str, tuple[int, list[int]]] = {}  # for tokens from this number on
        self._known: dict[str, Request] = {}  # requests that the proposer was asked about

    def waits_for(self, plan: Plan, scheduler: Scheduler, buckets: Iterable[Bucket]) -> bool:
        """Whether the next step can be planned only when this plan, in flight, is committed:
        what its drafts came to decides about all else, and drafts need their last token.

        buckets: the shapes that are loaded.
        """
        if plan.width > 1:
            return True
        return scheduler.may_verify and any(self._limits(scheduler.running, buckets))

    def propose(self, scheduler: Scheduler, buckets: Iterable[Bucket]) -> Drafts | None:
        """Drafts for the running requests, when every token is committed. None: nobody was to have
        any."""
        for name, request in list(self._known.items()):
            if scheduler.find(name) is not request:  # perhaps another one has its id by now
                self._forget(name)
        if not scheduler.may_verify:
            return None
        requests = [request for request in scheduler.running if request.num_uncomputed == 1]
        limits = self._limits(requests, buckets)
        if not any(limits):
            return None
        self._known.update((request.request_id, request) for request in requests)
        drafts = self._proposer.propose(requests, limits)
        width = self._control.width(requests, [len(draft) for draft in drafts])
        return {
            request.request_id: draft[: width - 1]
            for request, draft in zip(requests, drafts, strict=True)
            if draft[: width - 1]
        }

    def take_stats(self) -> SpeculationStats:
        """What was counted since this was asked last."""
        news, self._told = self.stats.since(self._told), self.stats.copy()
        return news

    def _limits(self, requests: Sequence[Request], buckets: Iterable[Bucket]) -> list[int]:
        most = widest(buckets, len(requests)) - 1
        if not most or not requests:
            return []
        return self._control.limits(
            requests, [min(self._most(request), most) for request in requests]
        )

    def audit(
        self, plan: Plan, output: StepOutput, rows: Mapping[str, InDraw], buckets: Iterable[Bucket]
    ) -> None:
        """Perhaps check a step that has run and is not committed, while nothing is in flight: see
        DraftAuditor. Raises whatever XLA does."""
        if self._auditor is not None and plan.width > 1:
            audited, wrong = self._auditor.audit(plan, output, rows, buckets)
            self.stats.num_audited += audited
            self.stats.num_audit_mismatches += wrong

    def observe(
        self,
        plan: Plan,
        output: StepOutput,
        rows: Mapping[str, InDraw],
        bucket: Bucket,
        seconds: float,
        *,
        drafting: bool,
    ) -> None:
        """Tell what came of a committed step without prefill, and how long it took after the one
        before. drafting: drafts were wanted for it, so that it waited for that one."""
        accepted = np.asarray(output.num_accepted).tolist()
        num_tokens = 0
        for item in plan.decode:
            name = item.request.request_id
            row, _ = rows[name]
            num_tokens += accepted[row] + 1
            if not item.drafts:
                for _ in range(plan.steps):
                    self.stats.record(0, 0)
                if not drafting and self._drafts_are_free:
                    self._learn(item.request, len(plan.decode))
                continue
            self.stats.record(len(item.drafts), accepted[row])
            self._proposer.observe(item.request, item.drafts, accepted[row])
            self._control.observe(name, len(item.drafts), accepted[row])
            if self._learner is not None:
                drawn = np.asarray(output.tokens)[row, : len(item.drafts) + 1].tolist()
                self._learner.observe_drawn(name, item.start + 1, item.drafts, drawn)
        self._control.observe_step(
            len(plan.decode),
            bucket.width,
            seconds / plan.steps,
            num_tokens // plan.steps,
            drafting=drafting,
            steps=plan.steps,
        )

    def _learn(self, request: Request, num_rows: int) -> None:
        """Judge what would have been drafted by the tokens that were drawn without: that costs no
        step. And guess again, unless steps of so many rows never have drafts."""
        name = request.request_id
        start, guess = self._guesses.pop(name, (0, []))
        if guess:
            drawn = request.token_ids(start, min(start + len(guess), request.num_tokens))
            judged, right = judge(guess, drawn)
            self._control.observe_missed(name, num_rows, judged, right)
        if request.status is not Status.RUNNING:
            return
        if self._known.get(name, request) is not request:
            self._forget(name)
        most = min(self._most(request), widest(self._table, num_rows) - 1)
        if not self._control.allows(num_rows):
            most = 0
        if most or name not in self._known:  # named once, so that its output may be learned from
            (guess,) = self._proposer.propose([request], [most])
            self._known[name] = request
            if guess:
                self._guesses[name] = request.num_tokens, guess

    def _most(self, request: Request) -> int:
        """By its own wish, and by the tokens it may still have."""
        most = min(self._num_drafts, request.max_tokens - len(request.output_token_ids) - 1)
        wish = request.params.num_speculative_tokens
        return max(0, most if wish is None else min(most, wish))

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._guesses.pop(name, None)
        self._proposer.forget(name)
        self._control.forget(name)


def make_speculator(
    config: SpeculativeConfig | None,
    buckets: Sequence[Bucket],
    device_proposer: Proposer | None,
    auditor: DraftAuditor | None = None,
) -> Speculator | None:
    """What a configuration asks for, over an engine's shapes; None: no speculation.

    device_proposer: one that runs on the device, if the method needs it. auditor: as of Speculator.
    Raises InvalidRequestError for a method that needs what this engine does not have.
    """
    if config is None:
        return None
    proposer = device_proposer or make_host_proposer(config)
    if proposer is None:
        raise InvalidRequestError(
            f"speculative_config: the method {config.method} needs a draft and this engine was "
            "given none; load it with load_draft, or choose ngram, suffix or lookahead",
            "speculative_config",
        )
    control = DraftControl(
        sorted({bucket.width for bucket in buckets}),
        sorted({bucket.decode_rows for bucket in buckets}),
        adaptive=config.adaptive,
        drafts_are_free=device_proposer is None,
        disable_by_batch_size=config.disable_by_batch_size,
    )
    free = device_proposer is None
    return Speculator(
        proposer,
        control,
        config.num_speculative_tokens,
        buckets,
        drafts_are_free=free,
        auditor=auditor,
    )
