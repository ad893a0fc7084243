"""What the KV manager notes about a request that holds pages, and what must be true of it."""

from dataclasses import dataclass

from jaxserve.engine.page_tree import Node
from jaxserve.engine.prefix_cache import PrefixCache
from jaxserve.engine.request import Request


@dataclass(eq=False, slots=True)
class Holding:
    """node: the node of its last full committed page, or the root; None if its pages are not to be
    found. num_findable: its full committed pages that are in the tree. kept_from: per group the
    first entry not given back. covered: tokens every list has room for. next_event: the smallest
    num_computed at which a commit has something to do.
    """

    node: Node | None
    num_findable: int
    kept_from: list[int]
    covered: int = 0
    next_event: int = 0


def first_seen_page(position: int, window: int | None, page_size: int) -> int:
    """The first page that a query at `position` or later can see."""
    return 0 if window is None else max(0, position - window + 1) // page_size


def check_pages(request: Request, windows: tuple[int | None, ...], cache: PrefixCache) -> None:
    """Raise AssertionError unless a request has what it needs, and alone has what it writes."""
    size, num_computed = cache.allocator.page_size, request.num_computed
    assert len(request.pages) == len(windows)
    for pages, window in zip(request.pages, windows, strict=True):
        assert len(pages) * size >= num_computed, "tokens without a page"
        first = first_seen_page(num_computed, window, size)
        assert all(page > 0 for page in pages[first:]), "a page that is needed was given back"
        assert not any(pages[:first]), "a page is held that nobody sees any more"
        for page in pages[num_computed // size :]:
            assert cache.allocator.ref_count(page) == 1, f"page {page} is written and shared"
            assert not cache.is_findable(page), f"page {page} is written and findable"


def check_findable(request: Request, holding: Holding, cache: PrefixCache) -> None:
    """Raise AssertionError unless the tree has all full committed pages of a request."""
    node, index = holding.node, holding.num_findable
    if node is None or not node.is_alive:
        return
    assert node.pins > 0, "somebody's last full page is not pinned"
    num_tokens = min(request.num_computed, request.num_tokens)
    assert index == num_tokens // cache.allocator.page_size, "full pages are not findable"
    while node.parent is not None:
        index -= 1
        assert node.key == cache.tree.key(request, index), "a node of another sequence"
        for group, pages in enumerate(request.pages):
            assert cache.stands_for(pages[index], node, group), "a page of another node"
        node = node.parent
    assert index == 0, "a node is at a wrong depth"
