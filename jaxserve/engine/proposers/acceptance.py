"""How likely drafts are to be accepted, measured: per position, per request, with a shared prior.

Position j's rate is that of draft j given that those before it were accepted. Old evidence fades,
that of positions which are not reached any more too, so that estimates follow what a text does now.
A request begins with what all requests saw lately. Where it does better or worse than they do at
one position it is expected to at the next: their odds differ by the same factor.
"""

from collections.abc import Sequence

_FIRST_GUESS = 0.6  # before anything was measured
_SHARED_PRIOR = 4.0  # trials that a guess counts as
_SHARED_FADES = 1 - 1 / 128  # per observation
_OWN_PRIOR = 2.0
_OWN_FADES = 1 - 1 / 8
_MOST_WEIGHT = 1e9
_LEAST, _MOST = 0.02, 0.98  # of a rate, so that odds stay finite


def judge(proposed: Sequence[int], emitted: Sequence[int]) -> tuple[int, int]:
    """(number of drafts that the new tokens tell about, how many of them were right).

    One-hot drafts are right where they equal the token that was drawn, whether they were verified
    or not: the first of a step without drafts, or the one behind the last that was verified.
    """
    judged = min(len(proposed), len(emitted))
    right = 0
    while right < judged and proposed[right] == emitted[right]:
        right += 1
    return judged, right


class _Evidence:
    """Faded numbers of trials and successes per position.

    Instead of all old numbers fading, new ones weigh more; `weight` is that of the newest.
    """

    def __init__(self, max_drafts: int, fades: float) -> None:
        self.trials = [0.0] * max_drafts
        self.successes = [0.0] * max_drafts
        self.weight = 1.0
        self._grows = 1.0 / fades

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.weight *= self._grows
        if self.weight > _MOST_WEIGHT:
            self.trials = [number / self.weight for number in self.trials]
            self.successes = [number / self.weight for number in self.successes]
            self.weight = 1.0
        trials, successes, weight = self.trials, self.successes, self.weight
        for j in range(min(num_accepted, len(trials))):
            trials[j] += weight
            successes[j] += weight
        if num_accepted < min(num_drafted, len(trials)):
            trials[num_accepted] += weight


class Acceptance:
    """Estimates for up to max_drafts drafts of any number of requests."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._shared = _Evidence(max_drafts, _SHARED_FADES)
        self._shared_odds: list[float] | None = None  # of acceptance; None: to be computed again
        self._nothing = _Evidence(max_drafts, _OWN_FADES)
        self._own: dict[str, _Evidence] = {}
        self._expected: dict[str, list[float]] = {}  # of requests since they were observed last
        self._expected_of_new: list[float] = []

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Note what came of a request's drafts in a step. Without drafts nothing is learned."""
        if not num_drafted:
            return
        self._shared.add(num_drafted, num_accepted)
        self._shared_odds = None
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Evidence(self._max_drafts, _OWN_FADES)
        own.add(num_drafted, num_accepted)
        self._expected.pop(request_id, None)

    def expected(self, request_id: str) -> list[float]:
        """Tokens that a step is expected to yield for the request with 0, 1, 2 ... drafts."""
        expected = self._expected.get(request_id)
        if expected is not None:
            return expected
        if self._shared_odds is None:
            self._shared_odds = _shared_odds(self._shared)
            self._expected_of_new = _expected_tokens(self._nothing, self._shared_odds)
        own = self._own.get(request_id)
        if own is None:
            return self._expected_of_new
        expected = self._expected[request_id] = _expected_tokens(own, self._shared_odds)
        return expected

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
        self._expected.pop(request_id, None)


def _shared_odds(evidence: _Evidence) -> list[float]:
    """What all requests saw, as odds (rate / (1 - rate)) per position."""
    odds = []
    prior = _SHARED_PRIOR * evidence.weight
    rate = _FIRST_GUESS  # a position about which little is known does as the one before it
    for trials, successes in zip(evidence.trials, evidence.successes, strict=True):
        rate = min(max((successes + prior * rate) / (trials + prior), _LEAST), _MOST)
        odds.append(rate / (1.0 - rate))
    return odds


def _expected_tokens(evidence: _Evidence, shared_odds: list[float]) -> list[float]:
    """1, 1 + a0, 1 + a0 + a0 a1, ... for a request's own rates a."""
    total = reached = 1.0
    expected = [total]
    weight = _OWN_PRIOR * evidence.weight
    factor = 1.0  # by which its odds are those of all
    for trials, successes, odds in zip(
        evidence.trials, evidence.successes, shared_odds, strict=True
    ):
        prior = factor * odds
        rate = (successes + weight * prior / (1.0 + prior)) / (trials + weight)
        if rate > _MOST:
            rate = _MOST
        elif rate < _LEAST:
            rate = _LEAST
        factor = rate / (1.0 - rate) / odds
        reached *= rate
        total += reached
        expected.append(total)
    return expected
