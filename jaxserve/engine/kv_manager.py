"""Which pages of the KV pool every request holds. Plain Python, one owner: the engine's thread.

A model's layers lie in *table groups* (`core/kv_layout.py`). A request has a list of pages for each
of them: entry i of `request.pages[g]` holds tokens [i * page_size, (i + 1) * page_size) for the
layers of group g. A page costs the same bytes in every group, so all groups draw on one budget.
A windowed group gives back what no later query can see: those entries become 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import Transfers
from jaxserve.engine.request import Request

UNLIMITED_TOKENS = 2**31 - 2  # positions are int32


@dataclass(frozen=True)
class CacheStats:
    """Counts since the start, except cached_pages and host_pages, which are of now.

    queried_tokens: tokens of all admitted requests; hit_tokens: those of them whose KV was found
    (from another running request too). evicted_pages left the pool; stored_pages of them went to
    host memory; loaded_pages came back from there; copied_pages were copied on write.
    cached_pages: in the pool, findable, held by no request; host_pages: findable in host memory.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
    copied_pages: int = 0
    cached_pages: int = 0
    host_pages: int = 0


@dataclass(eq=False, slots=True)
class _Holding:
    """What the manager notes about a request that holds pages.

    num_kept: pages of tokens committed so far that a commit has dealt with already;
    kept_from: per group the first entry not given back; covered: tokens every list has room for;
    next_event: the smallest num_computed at which a commit has something to do.
    """

    kept_from: list[int]
    covered: int = 0
    next_event: int = 0


class KVManager:
    """Owns the pool's pages: admission, growth, windows, release.

    windows: one entry for each table group: tokens a query sees, itself included, or None for all.
    max_chunk: most tokens of one request that a step may run.
    prefix_cache: whether finished work stays findable. host_pages: slots of host memory for pages
    that were evicted.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        *,
        max_chunk: int,
        prefix_cache: bool = True,
        host_pages: int = 0,
        kind: str = "",
    ) -> None:
        if max_chunk < 1 or any(window is not None and window < 1 for window in windows):
            raise ValueError(
                f"got max_chunk {max_chunk} and windows {windows}; a step runs at least 1 token "
                "of a request, and a window holds at least 1"
            )
        self.prefix_cache = prefix_cache
        self.swap_is_cheaper = host_pages > 0  # than computing again; the scheduler measures it
        self.kind = kind
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = windows
        self.num_groups = len(windows)
        self.max_chunk = max_chunk
        self._allocator = PageAllocator(num_pages, page_size, len(windows))
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._holdings: dict[Request, _Holding] = {}
        self._queried_tokens = 0
        self.capacity_tokens = self._capacity()

    # ------------------------------------------------------------------ sizes

    @property
    def num_free(self) -> int:
        """Pages that can be had without preempting anybody: free ones and evictable ones."""
        return self._allocator.num_free

    @property
    def num_used(self) -> int:
        """Pages held by requests."""
        return self._allocator.num_used

    @property
    def stats(self) -> CacheStats:
        return CacheStats(queried_tokens=self._queried_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens in one group."""
        return -(-num_tokens // self.page_size)

    def pages_needed(self, num_tokens: int) -> int:
        """The most pages, over all groups, that a request of `num_tokens` tokens holds at once.

        A windowed group: with c tokens committed, the oldest token a later query sees is
        c - window + 1; one step in flight and one being planned take at most 2 * max_chunk
        tokens from c on. These window - 1 + 2 * max_chunk tokens may begin at the last slot of
        a page, so they touch one page more than they fill.
        """
        pages = self.pages_for(num_tokens)
        total = pages * (self.num_groups - len(self._windowed))
        for _, window in self._windowed:
            span = window - 1 + 2 * self.max_chunk
            total += min(pages, self.pages_for(span - 1) + 1)
        return total

    def _capacity(self) -> int:
        """The longest request that fits alone, in tokens."""
        low, high = 0, UNLIMITED_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_needed(middle) <= self.num_pages - 1:
                low = middle
            else:
                high = middle - 1
        return low

    def _first_seen(self, num_computed: int, window: int | None) -> int:
        """The first page that a query at position num_computed or later can see."""
        return 0 if window is None else max(0, num_computed - window + 1) // self.page_size

    # ------------------------------------------------------------------ a request's pages

    def match(self, request: Request) -> int:  # noqa: ARG002
        """Tokens of the request whose KV is cached now, in the pool or in host memory; at most
        num_tokens - 1, because the last one is always run. Takes nothing."""
        return 0

    def admit(self, request: Request, source: Request | None = None) -> bool:  # noqa: ARG002
        """Give a waiting request the pages of all its tokens; False: too few, nothing changed.

        Windowed groups get what the first max_chunk tokens need; `grow` brings the rest.
        Sets request.pages and num_computed, and num_cached_tokens if it was never preempted.
        source: a running request that begins with the same tokens: what it has computed is shared
        if that is more than the cache has.
        """
        assert request not in self._holdings, f"{request.request_id} holds pages already"
        lists = [self.pages_for(self._end(request, 0, window)) for window in self.windows]
        pages = self._allocator.allocate(sum(lists))
        if pages is None:
            return False
        taken = iter(pages)
        request.pages = tuple([next(taken) for _ in range(count)] for count in lists)
        request.num_computed = 0
        if request.num_preemptions == 0:
            request.num_cached_tokens = 0
        self._queried_tokens += request.num_tokens
        holding = _Holding(kept_from=[0] * self.num_groups)
        self._holdings[request] = holding
        self._note_sizes(request, holding)
        return True

    def _end(self, request: Request, num_computed: int, window: int | None) -> int:
        """Tokens that the lists cover after admission with num_computed of them found."""
        if window is None:
            return request.num_tokens
        return min(request.num_tokens, num_computed + self.max_chunk)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make every list cover `num_tokens` tokens; False: too few pages, nothing changed.

        Called before a step for the tokens it runs, so that windowed groups too have room.
        """
        holding = self._holdings[request]
        if num_tokens <= holding.covered:
            return True
        wanted = self.pages_for(num_tokens)
        missing = [max(0, wanted - len(pages)) for pages in request.pages]
        fresh = self._allocator.allocate(sum(missing))
        if fresh is None:
            return False
        taken = iter(fresh)
        for pages, count in zip(request.pages, missing, strict=True):
            pages.extend(next(taken) for _ in range(count))
        self._note_sizes(request, holding)
        return True

    def commit(self, request: Request) -> None:
        """num_computed has advanced: full pages become findable, and windowed groups give back
        what no later query sees."""
        holding = self._holdings[request]
        if request.num_computed < holding.next_event:
            return
        for g, window in self._windowed:
            first = self._first_seen(request.num_computed, window)
            self._give_back(request.pages[g], holding.kept_from[g], first)
            holding.kept_from[g] = max(first, holding.kept_from[g])
        self._note_sizes(request, holding)

    def release(self, request: Request) -> None:
        """The request ends or is preempted. Its committed pages stay findable until evicted.

        Call it while num_computed and the token ids still say what was committed.
        """
        if self._holdings.pop(request, None) is not None:
            for pages in request.pages:
                self._allocator.release(page for page in pages if page)
        request.pages = ()

    def discard(self, request: Request) -> list[int]:
        """Like `release`, but nothing of it stays findable, because what it computed is not to be
        trusted. Returns the pages that are free now, to be cleaned before anyone gets them."""
        held = {page for pages in request.pages for page in pages if page}
        self.release(request)
        return sorted(page for page in held if self._allocator.ref_count(page) == 0)

    def take_transfers(self) -> Transfers:
        """What must be moved before the next step; it is forgotten here."""
        return Transfers()

    def clear(self) -> None:
        """The pool's content is lost and nobody holds pages: forget all that was cached."""
        assert not self._holdings, "requests hold pages of the pool that is cleared"

    # ------------------------------------------------------------------ parts

    def _give_back(self, pages: list[int], start: int, stop: int) -> None:
        leaving = pages[start:stop]
        pages[start:stop] = [0] * len(leaving)
        self._allocator.release(leaving)

    def _note_sizes(self, request: Request, holding: _Holding) -> None:
        size = self.page_size
        holding.covered = min(map(len, request.pages)) * size
        events = [(holding.kept_from[g] + 1) * size + window - 1 for g, window in self._windowed]
        holding.next_event = min(events, default=UNLIMITED_TOKENS)

    # ------------------------------------------------------------------ invariants

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless `requests` hold exactly the pages that are not free."""
        self._allocator.check_integrity()
        requests = list(requests)
        holders = {request for request in requests if request.pages}
        assert holders == self._holdings.keys(), "pages are held by somebody unknown"
        counts = [0] * self.num_pages
        for request in holders:
            assert len(request.pages) == self.num_groups
            for pages, window in zip(request.pages, self.windows, strict=True):
                self._check_list(request, pages, window)
                for page in pages:
                    counts[page] += page > 0
        for page in range(1, self.num_pages):
            assert counts[page] == self._allocator.ref_count(page), f"page {page}: wrong count"

    def _check_list(self, request: Request, pages: Sequence[int], window: int | None) -> None:
        assert len(pages) >= self.pages_for(request.num_computed)
        first = self._first_seen(request.num_computed, window)
        assert all(page > 0 for page in pages[first:]), "a page that is needed was given back"
