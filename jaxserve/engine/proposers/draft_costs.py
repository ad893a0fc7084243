"""What a step with drafts costs, measured, in plain decode steps of the same number of rows.

A ratio outlives the growth of contexts, which makes both kinds of steps slower. Each is the median
of the newest samples, so one outlier (the first step of a shape, a busy machine) changes nothing.
Steps are counted per class of rows: those that run in the same shape.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median_low

_SAMPLES = 15
_ENOUGH = 2  # samples of which the smaller one can be believed
_ENOUGH_PLAIN = 8  # all else is measured by them
_ENOUGH_AGAIN = 4  # new ones after they became stale
_PLAIN_STALE_AFTER = 256  # steps: then a few plain ones are run, to know what drafts compare to
_RATIO_STALE_AFTER = 4096


class _Samples:
    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_SAMPLES)
        self.median = 0.0
        self.total = 0  # steps that they are of
        self.fresh = 0  # of those since the last time they had become old
        self.seen = -(1 << 60)  # the step of the newest one

    def add(self, value: float, now: int, steps: int) -> None:
        self._values.append(value)
        self.median = median_low(self._values)
        self.total += steps
        self.fresh += steps
        self.seen = now

    def __len__(self) -> int:
        return len(self._values)


class DraftCosts:
    """The costs for one class of rows. widths: columns that a step may have, ascending, from 1."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._plain = _Samples()
        self._ratios: dict[int, _Samples] = {}
        self._now = 0
        self._was_drafting = False

    def knows_plain(self) -> bool:
        """Whether plain steps were measured lately. No from when that is too long ago until some
        have been again."""
        plain = self._plain
        if self._now - plain.seen > _PLAIN_STALE_AFTER:
            plain.fresh = 0
        return plain.total >= _ENOUGH_PLAIN and plain.fresh >= _ENOUGH_AGAIN

    def observe(self, width: int, seconds: float, *, drafting: bool, steps: int = 1) -> None:
        """Note `steps` steps in a row, each of so many seconds. drafting: they waited for drafts;
        else they were plain ones (width 1)."""
        self._now += steps
        waited, self._was_drafting = self._was_drafting, drafting
        if not drafting:
            if not waited:  # one after a step with drafts could not be dispatched ahead either
                self._plain.add(seconds, self._now, steps)
        elif len(self._plain) and self._plain.median > 0:
            samples = self._ratios.setdefault(width, _Samples())
            samples.add(seconds / self._plain.median, self._now, steps)

    def is_measured(self, width: int) -> bool:
        """Whether enough steps of this width were, not too long ago."""
        samples = self._ratios.get(width)
        return (
            samples is not None
            and len(samples) >= _ENOUGH
            and self._now - samples.seen <= _RATIO_STALE_AFTER
        )

    def ratio(self, width: int) -> float:
        """Plain steps that one of this width is expected to cost: measured, or on the line through
        the measured widths next to it; like a plain one while no other width was.

        A single sample that is above the line is not believed: it may be an outlier, and a width
        that looks too slow is not measured again soon.
        """
        known = self._ratios.get(width)
        if known is not None and len(known) >= _ENOUGH:
            return known.median
        line = self._on_line(width)
        return line if known is None else min(known.median, line)

    def _on_line(self, width: int) -> float:
        points = sorted((w, s.median) for w, s in self._ratios.items() if len(s) >= _ENOUGH)
        if not points or points[0][0] > 1:
            points.insert(0, (1, 1.0))
        if len(points) == 1:
            return points[0][1]
        right = next((i for i, (w, _) in enumerate(points) if w > width), len(points) - 1)
        (w0, r0), (w1, r1) = points[max(right, 1) - 1 : max(right, 1) + 1]
        slope = (r1 - r0) / (w1 - w0)
        if width > w1:  # a line that falls counts as level there
            return r1 + max(slope, 0.0) * (width - w1)
        return r0 + slope * (width - w0)

    def candidates(self) -> list[int]:
        """The widths above 1 to choose from: those measured and the next larger one, so that no
        step is much slower than any before it."""
        wide = self._widths[1:]
        largest = max((w for w in wide if w in self._ratios), default=1)
        return [w for i, w in enumerate(wide) if w <= largest or i == 0 or wide[i - 1] <= largest]
