"""How many pages a request takes, by arithmetic alone."""

from collections.abc import Sequence

UNLIMITED_TOKENS = 2**31 - 2  # positions are int32


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens in one group."""
    return -(-num_tokens // page_size)


def pages_needed(
    num_tokens: int, page_size: int, windows: Sequence[int | None], max_chunk: int
) -> int:
    """The most pages, over all groups, that a request of `num_tokens` tokens holds at once.

    A windowed group: with c tokens committed, the oldest token a later query sees is
    c - window + 1; one step in flight and one being planned take at most 2 * max_chunk
    tokens from c on. These window - 1 + 2 * max_chunk tokens may begin at the last slot of
    a page, so they touch one page more than they fill.
    """
    pages = pages_for(num_tokens, page_size)
    total = 0
    for window in windows:
        if window is None:
            total += pages
        else:
            span = window - 1 + 2 * max_chunk
            total += min(pages, pages_for(span - 1, page_size) + 1)
    return total


def longest_alone(
    num_pages: int, page_size: int, windows: Sequence[int | None], max_chunk: int
) -> int:
    """Tokens of the longest request that fits alone into `num_pages` pages."""
    low, high = 0, UNLIMITED_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if pages_needed(middle, page_size, windows, max_chunk) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low
