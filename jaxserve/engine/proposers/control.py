"""How many drafts pay: so many that a step yields the most tokens per second, or none.

Two estimates decide: the tokens that a row yields with so many drafts (acceptance.py) and what a
step of some width costs (draft_costs.py), for each class of batch sizes apart. Both come from steps
with drafts, so such steps are tried now and then where they do not seem to pay. What that may lose
is bounded by an account per class, in plain decode steps: every step adds a small allowance, a step
with drafts adds what it gained or takes what it lost, and with nothing left decode is plain until
the allowance has grown to a new try. So all decoding together takes at most the allowance (and a
few steps) longer than without speculation, whatever the texts and the machine do. Where tries fail
the allowance shrinks; where one succeeds its gains pay for the next at once. Drafts that were
made and not run are judged by the tokens drawn without them, which costs nothing: where they would
have gained enough, drafting is tried at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.proposers.acceptance import Acceptance
from jaxserve.engine.proposers.draft_costs import DraftCosts
from jaxserve.engine.request import Request

_ALLOWANCE = 0.015  # plain steps per step
_LEAST_ALLOWANCE = 0.005
_FIRST_BALANCE = 2.0
_TRY_FROM = 1.0  # the balance at which drafting is tried again
_MOST_BALANCE = 8.0  # gains beyond are not there to be lost later
_MARGIN = 1.03  # what drafts must gain by the estimates, which are noisy
_MISSED_ENOUGH = 3.0  # plain steps that drafts would have gained lately
_MISSED_FADES = 0.8  # per draft that was judged
_LONGEST_PAUSE = 32  # steps between tries of drafts that seem not to pay, while drafting


@dataclass
class _Account:
    """The state of one class of batch sizes."""

    costs: DraftCosts
    balance: float = _FIRST_BALANCE
    allowance: float = _ALLOWANCE
    drafting: bool = True
    pause: int = 1
    steps_to_try: int = 0
    missed: float = 0.0

    def miss(self, gain: float) -> None:
        """Note what drafts would have gained or lost that were not run."""
        self.missed = max(self.missed * _MISSED_FADES + gain, 0.0)
        if not self.drafting and self.missed >= _MISSED_ENOUGH:
            self.drafting, self.missed = True, 0.0
            self.balance = max(self.balance, _TRY_FROM)
            self.pause, self.steps_to_try = 1, 0

    def pay(self, gain: float | None, steps: int) -> None:
        """Note steps and what each gained over a plain one; None: they were plain."""
        self.steps_to_try -= steps
        earned = (self.allowance + (gain or 0.0)) * steps
        self.balance = min(self.balance + earned, _MOST_BALANCE)
        if self.drafting and self.balance <= 0:
            self.drafting = False
            self.allowance = max(self.allowance / 2, _LEAST_ALLOWANCE)
        elif not self.drafting and self.balance >= _TRY_FROM:
            self.drafting = True
            self.pause, self.steps_to_try = 1, 0
        elif self.balance >= 2 * _TRY_FROM and gain is not None:
            self.allowance = _ALLOWANCE


class DraftControl:
    """Decides how many drafts are wanted and how wide a step is. Used by one thread.

    widths: tokens per row that a decode step may have, ascending, from 1 (no drafts). row_sizes:
    the rows that steps are padded to, ascending. adaptive: False for as many drafts as allowed, in
    every step. drafts_are_free: proposing takes no time that counts (a look-up on the host), so
    whether drafts are worth verifying is decided when they are there. disable_by_batch_size: with
    so many requests or more nothing is drafted.
    """

    def __init__(
        self,
        widths: Sequence[int],
        row_sizes: Sequence[int],
        *,
        adaptive: bool = True,
        drafts_are_free: bool = True,
        disable_by_batch_size: int | None = None,
    ) -> None:
        if not widths or widths[0] != 1 or sorted(set(widths)) != list(widths):
            raise ValueError(f"got widths {tuple(widths)}; give ascending ones from 1 on")
        self._widths = tuple(widths)
        self._row_sizes = tuple(sorted(row_sizes))
        self._adaptive = adaptive
        self._drafts_are_free = drafts_are_free
        self._disable_by_batch_size = disable_by_batch_size
        self.acceptance = Acceptance(self._widths[-1] - 1)
        self._accounts: dict[int, _Account] = {}

    def allows(self, num_rows: int) -> bool:
        """Whether a step in which so many requests decode may have drafts at all."""
        return self._disable_by_batch_size is None or num_rows < self._disable_by_batch_size

    def limits(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        """The most drafts to propose for each decoding request, now. All 0: a plain decode step,
        which may be dispatched before the tokens of the one before it are known.

        most: what each may have by its own settings and the tokens it has left.
        """
        widest = self._widths[-1] - 1
        allowed = [max(min(number, widest), 0) for number in most]
        if not any(allowed) or not self.allows(len(requests)):
            return [0] * len(allowed)
        if not self._adaptive:
            return allowed
        account = self._account(len(requests))
        if not account.costs.knows_plain() or not account.drafting:
            return [0] * len(allowed)
        if not self._drafts_are_free:
            widest = self._choose(account, requests, allowed, cost_without=1.0) - 1
        return [min(number, widest) for number in allowed]

    def width(self, requests: Sequence[Request], drafted: Sequence[int]) -> int:
        """How wide the step should be that has these numbers of drafts: each request's drafts
        beyond width - 1 are to be dropped. requests: all that decode in it."""
        longest = max(drafted, default=0)
        if not longest:
            return 1
        if not self._adaptive or not self._drafts_are_free:  # `limits` has decided
            return next((w for w in self._widths if w > longest), self._widths[-1])
        account = self._account(len(requests))
        return self._choose(account, requests, drafted, cost_without=account.costs.ratio(1))

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Tell what came of a request's drafts in a step: those verified, or of one-hot drafts
        those `judge` can tell about, which are more."""
        self.acceptance.observe(request_id, num_drafted, num_accepted)

    def observe_missed(
        self, request_id: str, num_rows: int, num_drafted: int, num_right: int
    ) -> None:
        """Tell what a plain step says about drafts that were not run: of so many that `judge` can
        tell about, how many were right. num_rows: requests that decoded in it."""
        self.acceptance.observe(request_id, num_drafted, num_right)
        account = self._account(num_rows)
        width = next((w for w in self._widths if w > num_drafted), self._widths[-1])
        if num_drafted and account.costs.is_measured(width):
            account.miss((num_right + 1 - account.costs.ratio(width)) / num_rows)

    def observe_step(
        self,
        num_rows: int,
        width: int,
        seconds: float,
        num_tokens: int,
        *,
        drafting: bool,
        steps: int = 1,
    ) -> None:
        """Tell how long a step took in which num_rows requests decoded and nothing else was run.

        seconds: from the result before it to its own (or from when there was work again), so with
        the host's part wherever the device waited for it. num_tokens: that it yielded, over all
        rows. steps: how many were run in a row; seconds and num_tokens are of one. drafting:
        `limits` was not all 0 for it, so that it waited for the tokens before.
        """
        if num_rows < 1:
            return
        account = self._account(num_rows)
        account.costs.observe(width, seconds, drafting=drafting, steps=steps)
        if not drafting:
            account.pay(None, steps)
            return
        gain = num_tokens / num_rows - account.costs.ratio(width)
        account.pay(gain, steps)
        if gain > 0 and width > 1:
            account.pause, account.steps_to_try = 1, 0

    def forget(self, request_id: str) -> None:
        """The request ended or is gone."""
        self.acceptance.forget(request_id)

    def _account(self, num_rows: int) -> _Account:
        size = next((s for s in self._row_sizes if s >= num_rows), num_rows)
        account = self._accounts.get(size)
        if account is None:
            account = self._accounts[size] = _Account(DraftCosts(self._widths))
        return account

    def _choose(
        self,
        account: _Account,
        requests: Sequence[Request],
        drafted: Sequence[int],
        *,
        cost_without: float,
    ) -> int:
        """The width with the most tokens per second; or one to try, if none pays and it is time."""
        rows, longest = len(requests), max(drafted, default=0)
        numbers = [number for number in drafted if number > 0]
        expected = [
            self.acceptance.expected(request.request_id)
            for request, number in zip(requests, drafted, strict=True)
            if number > 0
        ]
        others = rows - len(numbers)  # yield one token each
        best, best_rate = 1, rows / cost_without * _MARGIN
        to_try, least_loss = 1, account.balance  # nothing is tried that may cost more
        for width in account.costs.candidates():
            ratio = account.costs.ratio(width)
            depths = [number if number < width else width - 1 for number in numbers]
            tokens = others + sum([e[depth] for e, depth in zip(expected, depths, strict=True)])
            if tokens / ratio > best_rate:
                best, best_rate = width, tokens / ratio
            could_pay = (rows + sum(depths)) / ratio > rows / cost_without * _MARGIN
            loss = ratio - tokens / rows
            if loss < least_loss and (could_pay or not account.costs.is_measured(width)):
                to_try, least_loss = width, loss
            if width > longest:
                break  # wider ones would be empty at their end
        if best == 1 and to_try > 1 and account.steps_to_try <= 0:
            account.pause = min(account.pause * 2, _LONGEST_PAUSE)
            account.steps_to_try = account.pause
            return to_try
        return best
