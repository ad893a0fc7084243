"""How long steps take, measured, and what follows: how much prefill a step may carry.

A stream waits for every step it is in, so while anybody decodes, the prefill part is as large as
keeps the step within MAX_STALL decode steps. Outputs never depend on it.

A step's time is that of its shape, so one estimate is kept for each size class of decode steps (by
rows) and of mixed steps (by prefill tokens; they all have the same decode part). Mixed steps in
which nobody decodes are kept apart: they lack the decoders' attention. An estimate is the median of
the newest samples: it forgets outliers and follows contexts that grow. Sizes that were not measured
lie on the line through their neighbours, so small sizes tell when the next larger one is worth
trying.
"""

import sys
from collections import deque
from collections.abc import Mapping
from statistics import median_low

MAX_STALL = 2.5  # decode steps that a step with prefill may take; below 3, for what is measured
_SAMPLES = 9  # four outliers among them change nothing
_STALE_AFTER = 512  # steps; older estimates of mixed steps are of other contexts


class _Estimate:
    """The median of the newest samples; of two, the smaller, because first steps are slow."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.seconds = 0.0
        self.seen = -1  # the step at which it was measured last

    def add(self, seconds: float, now: int) -> None:
        self._samples.append(seconds)
        self.seconds = median_low(self._samples)
        self.seen = now


class StepTimes:
    """Measured seconds of steps and of page copies. Used by one thread."""

    def __init__(self) -> None:
        self._decode: dict[int, _Estimate] = {}
        self._mixed: dict[int, _Estimate] = {}
        self._prefill: dict[int, _Estimate] = {}  # mixed steps in which nobody decoded
        self._copy = _Estimate()
        self._num_steps = 0

    def observe(self, num_decode: int, num_prefill_tokens: int, seconds: float) -> None:
        """Note a step of num_decode decode rows and num_prefill_tokens tokens, as run or padded."""
        self._num_steps += 1
        if not num_prefill_tokens:
            table, size = self._decode, num_decode
        else:
            table, size = self._mixed if num_decode else self._prefill, num_prefill_tokens
        table.setdefault(_size_class(size), _Estimate()).add(seconds, self._num_steps)

    def prefill_limit(self, num_decode: int, sizes: tuple[int, ...]) -> int:
        """The largest of the ascending `sizes` of a step's prefill part that stalls nobody.

        At least the smallest. No limit while nobody decodes or too little is measured.
        """
        decode = _line_at(self._points(self._decode), _size_class(num_decode))
        if not sizes or not num_decode or decode is None:
            return sizes[-1] if sizes else sys.maxsize
        points = self._points(self._mixed)
        if not points:  # as if the two parts ran one after the other
            points = [(size, decode + seconds) for size, seconds in self._points(self._prefill)]
        if not points:
            return sizes[-1]
        if len(points) == 1:
            points = [(0, decode), *points]
        for size in reversed(sizes):
            seconds = _line_at(points, _size_class(size))
            if seconds is not None and seconds <= MAX_STALL * decode:
                return size
        return sizes[0]

    def observe_copy(self, num_pages: int, seconds: float) -> None:
        """Note that moving `num_pages` pages to or from host memory took `seconds`."""
        if num_pages:
            self._copy.add(seconds / num_pages, self._num_steps)

    def swap_is_cheaper(self, page_size: int, num_groups: int) -> bool:
        """Whether pages that leave the pool should be kept in host memory. Yes until measured."""
        points = self._points(self._prefill) or self._points(self._mixed)
        if not points or self._copy.seen < 0:
            return True
        size, seconds = points[-1]
        return swap_is_cheaper(self._copy.seconds, seconds / size, page_size, num_groups)

    def _points(self, table: Mapping[int, _Estimate]) -> list[tuple[int, float]]:
        """(size class, seconds), ascending, of what was seen lately; of all if nothing was."""
        since = self._num_steps - _STALE_AFTER
        points = sorted((size, e.seconds) for size, e in table.items() if e.seen > since)
        return points or sorted((size, e.seconds) for size, e in table.items())


def swap_is_cheaper(
    copy_seconds: float, prefill_seconds: float, page_size: int, num_groups: int
) -> bool:
    """Whether moving a page's worth of tokens out and back beats computing it again.

    copy_seconds: of one page, one way; a page in each of num_groups groups holds page_size tokens.
    prefill_seconds: of one token.
    """
    return 2 * copy_seconds * num_groups < prefill_seconds * page_size


def _size_class(size: int) -> int:
    """The power of two that a size is padded to, about as the buckets are."""
    return 1 << max(size - 1, 0).bit_length()


def _line_at(points: list[tuple[int, float]], size: int) -> float | None:
    """The seconds at `size` on the line through the two points nearest to it; None without points.

    Beyond the measured sizes a line that falls counts as level.
    """
    if len(points) < 2:
        return points[0][1] if points else None
    right = next((i for i, (x, _) in enumerate(points) if x >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(right, 1) - 1 : max(right, 1) + 1]
    slope = (y1 - y0) / (x1 - x0)
    if size > x1:
        return y1 + max(slope, 0.0) * (size - x1)
    if size < x0:
        return max(y0 - max(slope, 0.0) * (x0 - size), 0.0)
    return y0 + slope * (size - x0)
