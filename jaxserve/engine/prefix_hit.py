"""Finds the longest beginning of a request whose KV exists already. Plain Python; takes nothing.

A hit of c tokens must hold in every table group: global groups need all pages up to c, windowed
ones those that the query at position c can see. Up to the last full page the pages are shared;
of the page that c lies in, a copy is used.
"""

from dataclasses import dataclass

from jaxserve.engine.page_tree import Node, PageTree
from jaxserve.engine.request import Request


@dataclass(frozen=True, slots=True)
class Hit:
    """`num_tokens` tokens of a request are computed already.

    nodes: the nodes of its full pages (none if `source` alone has them); source: a running
    request that has them; tail: who has the page to be copied, if a part of one is used.
    """

    num_tokens: int
    nodes: tuple[Node, ...] = ()
    source: Request | None = None
    tail: Node | Request | None = None

    def full_page(self, group: int, index: int) -> int:
        """The page to be shared; 0 if it is in host memory only."""
        if self.nodes:
            return self.nodes[index].pages[group]
        assert self.source is not None
        return self.source.pages[group][index]


class HitFinder:
    """Looks for hits in one tree, or in running requests alone if tree is None."""

    def __init__(
        self, tree: PageTree | None, page_size: int, windows: tuple[int | None, ...]
    ) -> None:
        self._tree = tree
        self._page_size = page_size
        self._windowed = [(g, window) for g, window in enumerate(windows) if window is not None]
        self.min_tail = min_tail_tokens(page_size)

    def find(self, request: Request, source: Request | None = None) -> Hit:
        """The best hit in the cache, or in what the running request `source` has computed if that
        is more. At most request.max_shared tokens."""
        limit = request.max_shared
        hit = Hit(0)
        path: list[Node] = []
        if self._tree is not None:
            path = self._tree.path(request, limit // self._page_size)
            hit = self._longest(self._tree, request, path, limit)
        if source is not None:
            other = self._in_running(request, source, path, limit)
            if other is not None and other.num_tokens > hit.num_tokens:
                return other
        return hit

    def _longest(self, tree: PageTree, request: Request, path: list[Node], limit: int) -> Hit:
        """The longest hit along `path` that holds in the windowed groups too."""
        size = self._page_size
        root = tree.find_root(request)
        if root is None:
            return Hit(0)
        num_pages = len(path)
        while True:
            start = num_pages * size
            parent = path[num_pages - 1] if num_pages else root
            tail, extra = self._find_tail(tree, request, parent, start, limit)
            missing = self._missing(path, num_pages, start + extra)
            if missing is None:
                return Hit(start + extra, tuple(path[:num_pages]), tail=tail)
            # Every hit that reaches beyond the missing page and is not longer needs it too.
            num_pages = missing

    def _find_tail(
        self, tree: PageTree, request: Request, parent: Node, start: int, limit: int
    ) -> tuple[Node | None, int]:
        stop = min(start + self._page_size, limit)
        if stop - start < self.min_tail or not parent.children:
            return None, 0
        return tree.find_alike(parent, tree.token_bytes(request, start, stop), self.min_tail)

    def _missing(self, path: list[Node], num_pages: int, num_tokens: int) -> int | None:
        """A page that a windowed group needs for a hit of num_tokens and that is gone."""
        for group, window in self._windowed:
            first = max(0, num_tokens - window + 1) // self._page_size
            for index in range(num_pages - 1, first - 1, -1):
                if not path[index].holds(group):
                    return index
        return None

    def _in_running(
        self, request: Request, source: Request, path: list[Node], limit: int
    ) -> Hit | None:
        """What `source` has computed of the request's tokens, if all of it can be shared."""
        if (source.cache_salt, source.adapter_id) != (request.cache_salt, request.adapter_id):
            return None
        size = self._page_size
        num_tokens = common_tokens(request, source, min(limit, source.num_computed))
        num_pages = num_tokens // size
        tail: Request | None = source
        if num_tokens - num_pages * size < self.min_tail or not all(
            pages[num_pages] for pages in source.pages
        ):
            num_tokens, tail = num_pages * size, None
        if num_tokens == 0:
            return None
        if 0 < num_pages <= len(path) and self._missing(path, num_pages, num_tokens) is None:
            return Hit(num_tokens, tuple(path[:num_pages]), source, tail)
        for group, window in self._windowed:
            first = max(0, num_tokens - window + 1) // size
            if not all(source.pages[group][first:num_pages]):
                return None
        return Hit(num_tokens, (), source, tail)


def min_tail_tokens(page_size: int) -> int:
    """The fewest tokens for which a part of a page is copied.

    A copy moves a whole page through memory and puts one more program in front of the step, to
    save the computation of these tokens among others that are run anyway. Below about a quarter
    of a page it is hardly worth it; chat templates begin every prompt with a few equal tokens, and
    those would otherwise cost every request a copy.
    """
    return page_size // 4 + 1


def common_tokens(request: Request, other: Request, limit: int) -> int:
    """How many tokens both begin with, at most `limit`."""
    limit = min(limit, request.num_tokens, other.num_tokens)
    left, right = request.token_ids(0, limit), other.token_ids(0, limit)
    if left == right:
        return limit
    return next(i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
