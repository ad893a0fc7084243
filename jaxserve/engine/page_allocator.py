"""Hands out the pages of the KV pool. Plain Python, one owner: the engine's thread.

Pages are interchangeable, so allocation is a stack of free ids; counts of references make a page
shareable between requests. A page that the prefix cache wants to keep is *findable*: when its last
reference goes it becomes idle instead of free, and waits, in the order of its last use, for
somebody to share it again or for the cache to give it up.

So every page is in exactly one state: free; used (has references); or idle (findable, no
references).
"""

from collections import OrderedDict
from collections.abc import Iterable


class PageAllocator:
    """Owns the pages 1 to num_pages - 1. Page 0 is never handed out: padding points at it.

    Releasing a page that is free is a bug of the caller and raises AssertionError.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"got {num_pages} pages of {page_size} tokens; a pool needs 2 pages (page 0 is "
                "reserved) of at least 1 token"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))  # lowest ids leave first
        self._ref_counts = [0] * num_pages
        self._findable = bytearray(num_pages)
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free) - len(self._idle)

    def ref_count(self, page: int) -> int:
        """How many requests hold `page`."""
        return self._ref_counts[page]

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` free pages with one reference each, or None, and then nothing is taken."""
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
        """Add a reference to each of `pages`, which are used or idle."""
        for page in pages:
            if self._ref_counts[page] == 0:
                assert page in self._idle, f"page {page} is free and cannot be shared"
                del self._idle[page]
            self._ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each of `pages`, in this order; those with none left are free
        again, or idle if they are findable."""
        for page in pages:
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} is free already"
            self._ref_counts[page] = count
            if count == 0:
                if self._findable[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    # ------------------------------------------------------------------ pages that are kept

    def keep(self, page: int) -> None:
        """Make a used page findable."""
        assert self._ref_counts[page] > 0, f"page {page} holds nobody's tokens"
        self._findable[page] = 1

    def drop(self, page: int) -> None:
        """Make a page not findable any more; an idle one is free then."""
        self._findable[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def touch(self, page: int) -> None:
        """Make an idle page the most recently used one."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def free_oldest_idle(self) -> int:
        """Free the idle page that was used least recently."""
        page, _ = self._idle.popitem(last=False)
        self._findable[page] = 0
        self._free.append(page)
        return page

    def idle_order(self) -> dict[int, int]:
        """Every idle page and its place in the order of use, oldest first. For checks."""
        return {page: place for place, page in enumerate(self._idle)}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free, idle or used, and just one of these."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free, "page 0 is reserved and must never be free"
        assert self._ref_counts[0] == 0, "page 0 is reserved and must never be held"
        assert not self._findable[0], "page 0 is reserved and must never be kept"
        for page in range(1, self.num_pages):
            count = self._ref_counts[page]
            assert count >= 0, f"page {page} has {count} references"
            states = (page in free) + (page in self._idle) + (count > 0)
            assert states == 1, f"page {page} is in {states} states, with {count} references"
            assert self._findable[page] or page not in self._idle, f"page {page} cannot be found"
            assert not self._findable[page] or page not in free, f"page {page} is free, yet found"
