"""Which pages of the KV pool every request holds. Plain Python, one owner: the engine's thread.

A model's layers lie in *table groups* (`core/kv_layout.py`). A request has a list of pages for each
of them: entry i of `request.pages[g]` holds tokens [i * page_size, (i + 1) * page_size) for the
layers of group g. A page costs the same bytes in every group, so all groups draw on one budget.
A windowed group gives back what no later query can see: those entries become 0.

A page is written only while one request holds it and it is not findable as a full page: pages
are shared when they are full and committed, and a request that begins inside a page gets a copy
of it. So no step writes what another request, or the cache, relies on.

Pages that are released or evicted may still be written or read by the step in flight. Steps and
transfers run in the order they were given to the device, so their next owner overwrites them.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest

from jaxserve.engine.cache_stats import CacheCounts, CacheStats
from jaxserve.engine.holding import Holding, check_findable, check_pages, first_seen_page
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.page_moves import NO_SLOT, Origin
from jaxserve.engine.page_needs import UNLIMITED_TOKENS, longest_alone, pages_for, pages_needed
from jaxserve.engine.page_tree import Node
from jaxserve.engine.plan import Transfers
from jaxserve.engine.prefix_cache import PrefixCache
from jaxserve.engine.prefix_hit import Hit, HitFinder
from jaxserve.engine.request import Request


class KVManager:
    """Owns the pool's pages: admission, growth, windows, sharing, release.

    windows: one entry for each table group: tokens a query sees, itself included, or None for all.
    max_chunk: most tokens of one request that a step may run.
    prefix_cache: whether finished work stays findable. host_pages: slots of host memory, of one
    page of one group each, for pages that were evicted; swap_is_cheaper: whether they are used,
    which the scheduler sets by what it measures. kind: what KV is (dtype, backend ...); it is part
    of every key.
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
        if max_chunk < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(
                f"got max_chunk {max_chunk} and windows {windows}; a step runs at least 1 token "
                "of a request, and there is at least 1 group, whose window holds at least 1"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = windows
        self.num_groups = len(windows)
        self.max_chunk = max_chunk
        self.prefix_cache = prefix_cache
        self.host_pages = host_pages if prefix_cache else 0
        self.swap_is_cheaper = True
        self._kind = kind
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._holdings: dict[Request, Holding] = {}
        self._counts = CacheCounts()
        self.capacity_tokens = longest_alone(num_pages - 1, page_size, windows, max_chunk)
        self._start_empty()

    def _start_empty(self) -> None:
        self._allocator = PageAllocator(self.num_pages, self.page_size)
        self._cache = PrefixCache(
            self._allocator, self._counts, self.windows, num_slots=self.host_pages, kind=self._kind
        )
        tree = self._cache.tree if self.prefix_cache else None
        self._finder = HitFinder(tree, self.page_size, self.windows)

    # ------------------------------------------------------------------ sizes

    def unused_places(self, requests: Iterable[Request]) -> int:
        """Places for tokens in the pages of `requests` that none of their tokens will fill.

        They are behind a request's last token, in pages it shares with nobody.
        """
        size = self.page_size
        return sum(
            max(0, len(pages) * size - request.num_tokens)
            for request in requests
            for pages in request.pages
        )

    @property
    def num_free(self) -> int:
        """Pages that can be had without preempting anybody: free ones and evictable ones."""
        return self._allocator.num_free + self._allocator.num_idle

    @property
    def num_used(self) -> int:
        """Pages held by requests."""
        return self._allocator.num_used

    @property
    def stats(self) -> CacheStats:
        return self._counts.stats(self._allocator.num_idle, self._cache.slots.num_owned)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens in one group."""
        return pages_for(num_tokens, self.page_size)

    def pages_needed(self, num_tokens: int) -> int:
        """The most pages, over all groups, that a request of `num_tokens` tokens holds at once."""
        return pages_needed(num_tokens, self.page_size, self.windows, self.max_chunk)

    # ------------------------------------------------------------------ a request's pages

    def match(self, request: Request) -> int:
        """Tokens of the request whose KV is cached now, in the pool or in host memory; at most
        num_tokens - 1, because the last one is always run. Takes nothing."""
        return self._finder.find(request).num_tokens

    def admit(self, request: Request, source: Request | None = None, *, leave: int = 0) -> bool:
        """Give a waiting request the pages of all its tokens; False: too few, nothing changed.

        Windowed groups get what the first max_chunk tokens after the hit need; `grow` brings the
        rest. Sets request.pages and num_computed, and num_cached_tokens if it was never preempted.
        source: a running request that begins with the same tokens: what it has computed is shared
        if that is more than the cache has. leave: pages that must be left free for others, beside
        those that windowed groups of the request will come to need for its tokens.
        """
        assert request not in self._holdings, f"{request.request_id} holds pages already"
        hit = self._finder.find(request, source)
        num_full = hit.num_tokens // self.page_size
        first_seen = [
            first_seen_page(hit.num_tokens, window, self.page_size) for window in self.windows
        ]
        shared = [
            [hit.full_page(g, i) for i in range(first, num_full)]
            for g, first in enumerate(first_seen)
        ]
        ends = [self.pages_for(self._end(request, hit, window)) for window in self.windows]
        held = [page for pages in shared for page in pages if page]
        num_fresh = sum(pages.count(0) for pages in shared) + sum(ends) - num_full * len(ends)
        num_free = self.num_free - num_fresh - sum(map(self._allocator.is_idle, held))
        most_later = self.pages_needed(request.num_tokens) - num_fresh - len(held)
        later = min(most_later, self.pages_for(request.num_tokens) * len(ends) - sum(ends))
        if num_free < max(later, 0) + leave:
            return False
        self._allocator.share(held)
        node = self._pin_node(request, hit)
        origins = self._hold_origins(hit, first_seen)
        fresh = iter(self._take(num_fresh))
        for group, (first, pages, end) in enumerate(zip(first_seen, shared, ends, strict=True)):
            for index, page in enumerate(pages):
                if page == 0:
                    pages[index] = next(fresh)
                    self._cache.load(hit.nodes[first + index], group, pages[index])
            pages.extend(islice(fresh, end - num_full))
            pages[:0] = [0] * first
        for pages, origin in zip(shared, origins, strict=False):
            self._cache.copy(origin, pages[num_full])
        request.pages = tuple(shared)
        self._begin(request, hit, Holding(node, num_full, first_seen))
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make every list cover `num_tokens` tokens, those that the next step runs; False: too few
        pages, nothing changed."""
        holding = self._holdings[request]
        if num_tokens <= holding.covered:
            return True
        wanted = self.pages_for(num_tokens)
        missing = [max(0, wanted - len(pages)) for pages in request.pages]
        if sum(missing) > self.num_free:
            return False
        fresh = iter(self._take(sum(missing)))
        for pages, count in zip(request.pages, missing, strict=True):
            pages.extend(islice(fresh, count))
        holding.covered = min(map(len, request.pages)) * self.page_size
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Give back the pages behind `num_tokens` tokens, which hold nothing that counts."""
        wanted = self.pages_for(num_tokens)
        for pages in reversed(request.pages):  # what was taken last goes first
            self._cache.release(pages[wanted:][::-1])
            del pages[wanted:]
        self._holdings[request].covered = min(map(len, request.pages)) * self.page_size

    def commit(self, request: Request) -> None:
        """num_computed has advanced: full pages become findable, and windowed groups give back
        what no later query sees."""
        holding = self._holdings[request]
        if request.num_computed < holding.next_event:
            return
        self._make_findable(request, holding)
        for g, window in self._windowed:
            start = holding.kept_from[g]
            stop = first_seen_page(request.num_computed, window, self.page_size)
            if start < stop:
                pages = request.pages[g]
                self._cache.release(pages[start:stop])
                pages[start:stop] = [0] * (stop - start)
                holding.kept_from[g] = stop
        self._note_next_event(holding)

    def release(self, request: Request) -> None:
        """The request ends or is preempted. Its committed pages stay findable until evicted.

        Call it while num_computed and the token ids still say what was committed.
        """
        holding = self._holdings.pop(request, None)
        if holding is not None:
            self._make_findable(request, holding)
            self._make_tail_findable(request, holding)
            self._let_go(request, holding)

    def discard(self, request: Request) -> list[int]:
        """Like `release`, but its KV is not to be trusted: nothing of it, and nothing that others
        may have taken from it, stays findable. Returns the pages that are free now, to be cleaned
        before anyone gets them."""
        holding = self._holdings.pop(request, None)
        if holding is None:
            return []
        freed = self._distrust(request)
        held = {page for pages in request.pages for page in pages if page}
        self._let_go(request, holding)
        return freed + [page for page in sorted(held) if self._allocator.ref_count(page) == 0]

    def _distrust(self, request: Request) -> list[int]:
        """Forget all that begins like a request, so that a page could be shared or copied."""
        tree, begin = self._cache.tree, self._finder.min_tail
        root = tree.find_root(request)
        if root is None or request.num_tokens < begin:
            return []
        tokens = tree.token_bytes(request, 0, begin)
        for other, holding in self._holdings.items():  # who has no full page yet
            if holding.node is root and tree.token_bytes(other, 0, begin) == tokens:
                root.pins -= 1
                holding.node = None
        alike = [node for node in root.children.values() if node.tokens.startswith(tokens)]
        return [page for node in alike for page in self._cache.remove(node)]

    def adopt(
        self, request: Request, num_tokens: int, first_pages: Sequence[int]
    ) -> list[int] | None:
        """Take pages for the KV of a request's first tokens, which comes from elsewhere: in group
        g those from first_pages[g] on. Returns them, group by group, to be written before anything
        else happens; `release` then makes them findable. None: too few, or nothing is cached."""
        num_pages = self.pages_for(num_tokens)
        count = sum(num_pages - first for first in first_pages)
        if not self.prefix_cache or count > self.num_free:
            return None
        pages = self._take(count)
        taken = iter(pages)
        request.pages = tuple(
            [0] * first + list(islice(taken, num_pages - first)) for first in first_pages
        )
        request.num_computed = num_tokens
        root = self._cache.tree.root(request)
        root.pins += 1
        self._holdings[request] = Holding(root, 0, list(first_pages))
        return pages

    def take_transfers(self) -> Transfers:
        """What must be moved before the next step; it is forgotten here."""
        self._cache.slots.unpin_all()
        return self._cache.moves.take()

    def clear(self) -> None:
        """The pool's content is lost and nobody holds pages: forget all that was cached."""
        assert not self._holdings, "requests hold pages of the pool that is cleared"
        self._start_empty()

    # ------------------------------------------------------------------ parts

    def _end(self, request: Request, hit: Hit, window: int | None) -> int:
        """Tokens that a group's list covers after admission."""
        if window is None:
            return request.num_tokens
        return min(request.num_tokens, hit.num_tokens + self.max_chunk)

    def _take(self, num_pages: int) -> list[int]:
        """Pages nobody holds, evicting as many as it takes; the caller knows that there are."""
        self._cache.stores_pages = self.swap_is_cheaper
        while num_pages > self._allocator.num_free:
            self._cache.evict_oldest()
        pages = self._allocator.allocate(num_pages)
        assert pages is not None
        self._cache.moves.forget_pages(pages)
        return pages

    def _hold_origins(self, hit: Hit, first_seen: list[int]) -> list[Origin]:
        """Make sure that no eviction takes away what the hit loads and copies.

        Returns where the content of its partly used page is, per group; empty if there is none.
        """
        slots = self._cache.slots
        for index, node in enumerate(hit.nodes if self.host_pages else ()):
            for group, first in enumerate(first_seen):
                if index >= first and not node.pages[group]:
                    slots.pin(node.slots[group])
        if hit.tail is None:
            return []
        if isinstance(hit.tail, Node):
            self._cache.touch(hit.tail)
            places = list(zip(hit.tail.pages, hit.tail.slots, strict=True))
        else:
            num_full = hit.num_tokens // self.page_size
            places = [(pages[num_full], NO_SLOT) for pages in hit.tail.pages]
        origins = [
            self._cache.moves.origin(page) if page else Origin(slot=slot) for page, slot in places
        ]
        for origin in origins:
            if origin.slot != NO_SLOT:
                slots.pin(origin.slot)
        return origins

    def _pin_node(self, request: Request, hit: Hit) -> Node | None:
        """The node after which a newcomer's pages come; None if they are not to be found."""
        if not self.prefix_cache or len(hit.nodes) < hit.num_tokens // self.page_size:
            return None
        node = hit.nodes[-1] if hit.nodes else self._cache.tree.root(request)
        node.pins += 1
        return node

    def _begin(self, request: Request, hit: Hit, holding: Holding) -> None:
        """Note a newcomer that has its pages."""
        request.num_computed = hit.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(hit.num_tokens, len(request.prompt_token_ids))
        self._counts.queried_tokens += request.num_tokens
        self._counts.hit_tokens += hit.num_tokens
        holding.covered = min(map(len, request.pages)) * self.page_size
        self._note_next_event(holding)
        self._holdings[request] = holding

    def _note_next_event(self, holding: Holding) -> None:
        size = self.page_size
        event = UNLIMITED_TOKENS
        if holding.node is not None:
            event = (holding.num_findable + 1) * size
        for group, window in self._windowed:
            event = min(event, (holding.kept_from[group] + 1) * size + window - 1)
        holding.next_event = event

    def _make_findable(self, request: Request, holding: Holding) -> None:
        """Put the full pages that were committed since into the tree."""
        last = holding.node
        if last is None:
            return
        if not last.is_alive:  # somebody discarded what it begins with
            holding.node = None
            return
        num_full = min(request.num_computed, request.num_tokens) // self.page_size
        if num_full <= holding.num_findable:
            return
        node = self._cache.add_pages(last, request, holding.num_findable, num_full)
        last.pins -= 1
        node.pins += 1
        holding.node, holding.num_findable = node, num_full

    def _make_tail_findable(self, request: Request, holding: Holding) -> None:
        """Put the partly filled last page into the tree, if it is worth it."""
        num_tokens = min(request.num_computed, request.num_tokens)
        num_full, extra = divmod(num_tokens, self.page_size)
        if extra < self._finder.min_tail or num_full != holding.num_findable:
            return
        if holding.node is not None:
            self._cache.add_tail(holding.node, request, num_full, extra)

    def _let_go(self, request: Request, holding: Holding) -> None:
        """Give all pages back, the last tokens first: they are evicted first."""
        columns = zip_longest(*request.pages, fillvalue=0)
        self._cache.release([page for column in reversed(list(columns)) for page in column if page])
        request.pages = ()
        if holding.node is not None:
            holding.node.pins -= 1
            self._cache.tree.prune(holding.node)

    # ------------------------------------------------------------------ invariants

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless `requests` hold exactly the pages in use, nobody writes what
        others rely on, and the cache is consistent."""
        self._allocator.check_integrity()
        self._cache.check_integrity()
        holders = {request for request in requests if request.pages}
        assert holders == self._holdings.keys(), "pages are held by somebody unknown"
        counts = [0] * self.num_pages
        for request, holding in self._holdings.items():
            check_pages(request, self.windows, self._cache)
            check_findable(request, holding, self._cache)
            for page in chain(*request.pages):
                counts[page] += page > 0
        for page in range(1, self.num_pages):
            assert counts[page] == self._allocator.ref_count(page), f"page {page}: wrong count"
        assert self.num_free + self.num_used == self.num_pages - 1
