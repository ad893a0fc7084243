"""How long steps take, measured, and what follows: how much prefill a step may carry.

A stream waits for every step it is in, so while anybody decodes, the prefill part is as large as
keeps the step within some (max_stall) decode steps. Outputs never depend on it.

A step's time is that of its shape, so one estimate is kept for each size class of decode steps (by
rows) and of mixed steps (by prefill tokens; they all have the same decode part). Mixed steps in
which nobody decodes are kept apart: they lack the decoders' attention. An estimate is the median of
the newest samples: it forgets outliers and follows contexts that grow. Sizes that were not measured
lie on the line through their neighbours, so small sizes tell when the next larger one is worth
trying.

Far into a long prompt the attention of a chunk takes longer than all else. So estimates of mixed
steps are of short contexts, and steps with long ones tell what a pair of tokens, one attending to
the other, adds to that. Fewer tokens than the smallest shape are run then: its padding costs no
attention.
"""

import sys
from collections import deque
from collections.abc import Mapping
from statistics import median_low

DEFAULT_MAX_STALL = 2.5  # so that what is measured stays below 3
_LEAST_GROWTH = 1.25  # what the smallest shape may take longer by attention, at least
_FEWEST_TOKENS = 4  # of a prompt in a step: reading its keys and values once is for these
_SHORT_CONTEXT = 512  # tokens; the attention of fewer counts as part of a step's shape
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
    """Measured seconds of steps and of page copies. Used by one thread.

    max_stall: decode steps that a step with prefill may take; 0: any number.
    """

    def __init__(self, max_stall: float = DEFAULT_MAX_STALL) -> None:
        self._max_stall = max_stall
        self._decode: dict[int, _Estimate] = {}
        self._mixed: dict[int, _Estimate] = {}
        self._prefill: dict[int, _Estimate] = {}  # mixed steps in which nobody decoded
        self._pair = _Estimate()  # of a token attending to another, in mixed steps
        self._copy = _Estimate()
        self._num_steps = 0

    def observe(
        self, num_decode: int, num_prefill_tokens: int, seconds: float, num_pairs: int = 0
    ) -> None:
        """Note a step of num_decode decode rows and a prefill part of num_prefill_tokens tokens,
        both as run or padded; num_pairs: of its tokens and those they attend to."""
        if num_decode and num_pairs >= _SHORT_CONTEXT * num_prefill_tokens > 0:
            points = self._mixed_points(num_decode)
            if points:
                shape = _line_at(points, _size_class(num_prefill_tokens)) or 0.0
                self._pair.add(max(seconds - shape, 0.0) / num_pairs, self._num_steps)
                return  # not counted: a long prompt may take so many that all else would be stale
        self._num_steps += 1
        if not num_prefill_tokens:
            table, size = self._decode, num_decode
        else:
            table, size = self._mixed if num_decode else self._prefill, num_prefill_tokens
        table.setdefault(_size_class(size), _Estimate()).add(seconds, self._num_steps)

    def prefill_limit(self, num_decode: int, sizes: tuple[int, ...], context: int = 0) -> int:
        """The most tokens of a step's prefill part that stall nobody.

        sizes: what the part is padded to, ascending. context: tokens before those that run. One of
        the sizes, or fewer because of the context. At least what the smallest size may take. No
        limit while nobody decodes or no decode step was measured.
        """
        decode = self.decode_seconds(num_decode)
        if not sizes or not num_decode or decode is None or not self._max_stall:
            return sizes[-1] if sizes else sys.maxsize
        points = self._mixed_points(num_decode)
        if not points:
            return sizes[0]  # which then tells about the others
        shapes = [_line_at(points, _size_class(size)) or 0.0 for size in sizes]
        longest = max(self._max_stall * decode, _LEAST_GROWTH * shapes[0])
        token = self._pair.seconds * context
        most = min(_FEWEST_TOKENS, sizes[0])
        for size, seconds in zip(sizes, shapes, strict=True):
            left = longest - seconds
            if left >= 0:
                most = max(most, size if token * size <= left else int(left / token))
        return most

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

    def decode_seconds(self, num_decode: int) -> float | None:
        """What a decode step of so many rows takes; None: not known."""
        return _line_at(self._points(self._decode), _size_class(num_decode))

    def _mixed_points(self, num_decode: int) -> list[tuple[int, float]]:
        """(size class, seconds) of mixed steps with short contexts, from no prefill tokens on;
        empty if too little is measured."""
        decode = self.decode_seconds(num_decode)
        if decode is None:
            return []
        points = self._points(self._mixed)
        if not points:  # as if the two parts ran one after the other
            points = [(size, decode + seconds) for size, seconds in self._points(self._prefill)]
        return [(0, decode), *points] if points else []

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
