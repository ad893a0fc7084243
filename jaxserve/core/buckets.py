"""The closed table of step shapes. Every step is padded to one of them, so nothing else compiles.

Two kinds: decode steps (rows only) and mixed steps (all decode rows and some prefill tokens). With
speculation a third: decode steps whose rows own several tokens, to verify drafts.
A mixed step always carries the largest decode part: one axis varies at a time, so the table has
about ten entries instead of a product. Plain Python: no jax.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PREFILL_ROWS = 8  # prompts that share a step; each costs a row of logits, used or not
STEP_COST_TOKENS = 64  # what one more step costs (reading the weights, padded decode rows)

# Drafts pay where a step waits for memory. With more tokens than this the arithmetic takes as long,
# on whatever machine; and each shape is a program to load.
MAX_VERIFY_TOKENS = 64

_DECODE_ROWS = (1, 4, 16, 64, 128, 256, 512)
# A step with this much prefill takes at most about twice as long as without, also where every token
# costs its arithmetic (a CPU: 1.4 times, 64 tokens 3.3 times; SmolLM2, 16 rows).
_SMALLEST_PREFILL = 16
_FIRST_PREFILL = 64  # prefill tokens of the bucket that serves alone until the others are loaded


@dataclass(frozen=True)
class Bucket:
    """A step's static shape: decode_rows of `width` tokens each, then the prefill part."""

    decode_rows: int
    width: int
    prefill_rows: int
    prefill_tokens: int

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def num_tokens(self) -> int:
        return self.decode_rows * self.width + self.prefill_tokens

    @property
    def name(self) -> str:
        if self.prefill_tokens:
            return f"mixed{self.decode_rows}+{self.prefill_tokens}"
        if self.width > 1:
            return f"verify{self.decode_rows}x{self.width}"
        return f"decode{self.decode_rows}"


def bucket_table(
    max_batch_rows: int, max_batch_tokens: int, num_drafts: int = 0
) -> tuple[Bucket, ...]:
    """All shapes of an engine, smallest first within each kind. num_drafts: of a row at most.

    The largest decode bucket holds exactly max_batch_rows rows and the largest mixed bucket
    exactly max_batch_tokens prefill tokens, so whatever the scheduler may plan has a shape.
    Raises ValueError when a limit is below 1.
    """
    if max_batch_rows < 1 or max_batch_tokens < 1:
        raise ValueError(
            f"got max_batch_rows {max_batch_rows} and max_batch_tokens {max_batch_tokens}; "
            "both must be at least 1"
        )
    decode_rows = [rows for rows in _DECODE_ROWS if rows < max_batch_rows] + [max_batch_rows]
    prefill_tokens = []
    size = _SMALLEST_PREFILL
    while size < max_batch_tokens:
        prefill_tokens.append(size)
        size *= 2
    prefill_tokens.append(max_batch_tokens)
    decode = [Bucket(rows, 1, 0, 0) for rows in decode_rows]
    mixed = [
        Bucket(max_batch_rows, 1, min(MAX_PREFILL_ROWS, max_batch_rows, tokens), tokens)
        for tokens in prefill_tokens
    ]
    verify = [
        Bucket(rows, width, 0, 0)
        for rows in decode_rows
        for width in verify_widths(num_drafts)
        if rows * width <= MAX_VERIFY_TOKENS
    ]
    return (*decode, *mixed, *verify)


def verify_widths(num_drafts: int) -> tuple[int, ...]:
    """Tokens a row may have in steps that verify: all drafts and the token before them, half as
    many drafts, and so on."""
    drafts = []
    while num_drafts > 0:
        drafts.append(num_drafts)
        num_drafts //= 2
    return tuple(count + 1 for count in sorted(drafts))


def most_decode_rows(available: Iterable[Bucket]) -> int:
    """The rows of the largest of these buckets that are for decode alone; 0 without one."""
    rows = [b.decode_rows for b in available if b.width == 1 and not b.prefill_tokens]
    return max(rows, default=0)


def widest(available: Iterable[Bucket], num_decode: int) -> int:
    """Tokens that each of so many decode rows may have, at most, in one of these buckets."""
    return max((b.width for b in available if b.decode_rows >= num_decode), default=1)


def first_bucket(table: Iterable[Bucket]) -> Bucket:
    """The one to load first: it serves everything, and prompts in no more steps than need be."""
    mixed = [bucket for bucket in table if bucket.prefill_tokens]
    return next((b for b in mixed if b.prefill_tokens >= _FIRST_PREFILL), mixed[-1])


def largest_bucket(buckets: Iterable[Bucket]) -> Bucket:
    """The one whose step takes the most memory."""
    return max(buckets, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))


def pick_bucket(
    available: Iterable[Bucket],
    num_decode: int,
    num_prefill_rows: int,
    num_prefill_tokens: int,
    width: int = 1,
) -> Bucket:
    """The smallest bucket of `available` (the whole table, or the part already compiled) that fits.

    width: the most tokens of a decode row. Raises ValueError when none does: a scheduler limit and
    the table disagree.
    """
    available = tuple(available)
    fitting = [
        bucket
        for bucket in available
        if (bucket.width >= width if width > 1 else bucket.width == 1)
        and bucket.decode_rows >= num_decode
        and bucket.prefill_rows >= num_prefill_rows
        and bucket.prefill_tokens >= num_prefill_tokens
    ]
    if not fitting:
        raise ValueError(
            f"no bucket holds {num_decode} decode rows of {width} and {num_prefill_tokens} prefill "
            f"tokens in {num_prefill_rows} rows; available: "
            f"{', '.join(b.name for b in available) or 'none'}"
        )
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))


def prefill_sizes(table: Iterable[Bucket]) -> tuple[int, ...]:
    """The prefill token counts of the table's mixed buckets, ascending."""
    return tuple(sorted({bucket.prefill_tokens for bucket in table if bucket.prefill_tokens}))


def prefill_budget(sizes: tuple[int, ...], wanted: int) -> int:
    """How many of `wanted` prefill tokens to run now, so that little of the step is padding.

    Either all of them, padded up to the next size, or as many as fill the size below, leaving the
    rest to the next step, where they may share a bucket with newcomers. The second is taken only
    where it computes fewer tokens in sum, a further step counted as STEP_COST_TOKENS: 260 run as
    256 and then 4 (padded to 16), not padded to 512; 200 run padded to 256.
    `sizes` ascend; without sizes nothing is rounded.
    """
    if not sizes:
        return wanted
    if wanted >= sizes[-1]:
        return sizes[-1]
    above = next(size for size in sizes if size >= wanted)
    below = max((size for size in sizes if size <= wanted), default=wanted)
    if below == wanted:
        return wanted
    rest = next(size for size in sizes if size >= wanted - below)
    return below if below + rest + STEP_COST_TOKENS < above else wanted
