"""Hands out the pages of the KV pool. Plain Python, one owner: the engine's thread.

Pages are interchangeable, so allocation is a stack of free ids; counts of references make a page
shareable between requests. All KV groups of a model use the same page id for the same tokens
(each layer has its own arrays), so one id stands for that page in every group.
"""

from collections.abc import Iterable


class PageAllocator:
    """Owns the pages 1 to num_pages - 1. Page 0 is never handed out: padding points at it.

    num_groups: KV groups of the model; every request keeps one list of page ids per group.
    Releasing a page that is free is a bug of the caller and raises AssertionError.
    """

    def __init__(self, num_pages: int, page_size: int, num_groups: int = 1) -> None:
        if num_pages < 2 or page_size < 1 or num_groups < 1:
            raise ValueError(
                f"got {num_pages} pages of {page_size} tokens in {num_groups} groups; a pool needs "
                "2 pages (page 0 is reserved) of at least 1 token in at least 1 group"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_groups = num_groups
        self._free = list(range(num_pages - 1, 0, -1))  # lowest ids leave first
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV one request could hold if it had the pool to itself."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        """How many requests hold `page`."""
        return self._ref_counts[page]

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` pages with one reference each, or None, and then nothing is taken."""
        assert num_pages >= 0, f"cannot allocate {num_pages} pages"
        if num_pages > len(self._free):
            return None
        kept = len(self._free) - num_pages
        pages = self._free[kept:]
        del self._free[kept:]
        pages.reverse()
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which somebody holds already."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is free and cannot be shared"
            self._ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each of `pages`; those with none left are free again."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is free already"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is either free, once, or referenced."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free, "page 0 is reserved and must never be free"
        assert self._ref_counts[0] == 0, "page 0 is reserved and must never be held"
        for page in range(1, self.num_pages):
            count = self._ref_counts[page]
            assert (page in free) == (count == 0), f"page {page}: {count} references, free list"
            assert count >= 0, f"page {page} has {count} references"
