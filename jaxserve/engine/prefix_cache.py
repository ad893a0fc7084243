"""Finished work that may be used again: which pages are findable, and what goes first.

A request's full pages become findable when they are committed, its partly filled last one when it
is released. Others share full pages as they are and copy a partly usable one. Pages of several
groups with the same tokens belong to one node of a tree (`page_tree`). Plain Python.

**Order of eviction.** A released request gives its pages back last one first, so among idle pages
of a global group a page always stands before its parent's: evicting in the order of last use takes
leaves first, at O(1) a page. What makes this true is that whoever holds a page of a global group
holds one for each of its ancestors. Two requests may have computed the same page at once: then the
first one's is findable and the other's is its *twin*, which takes its place when the first holder
leaves. Pages of windowed groups come and go within a node as they like.

**A node is lost** when a global group's KV of it is neither in the pool nor in host memory, or any
group's if it is a tail: then it goes, with all below it.
"""

from jaxserve.engine.cache_stats import CacheCounts
from jaxserve.engine.host_slots import HostSlots
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.page_moves import NO_SLOT, Origin, PageMoves
from jaxserve.engine.page_tree import TOKEN_BYTES, Node, PageTree, child_key
from jaxserve.engine.request import Request


class PrefixCache:
    """The findable pages of `allocator`, by token ids, and the moves that follow from using them.

    windows: per table group, or None. num_slots: pages of host memory. stores_pages: whether
    evicted pages go there. kind: what the KV is (dtype, layout ...), for the keys.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        counts: CacheCounts,
        windows: tuple[int | None, ...],
        *,
        num_slots: int = 0,
        kind: str = "",
    ) -> None:
        self.allocator = allocator
        self.windows = windows
        self._counts = counts
        self.stores_pages = True
        self.moves = PageMoves()
        self.slots = HostSlots(num_slots)
        self.tree = PageTree(allocator.page_size, len(windows), kind)
        self._places: list[tuple[Node, int] | None] = [None] * allocator.num_pages
        self._twins: dict[tuple[Node, int], list[int]] = {}
        self._twin_of: dict[int, tuple[Node, int]] = {}

    # ------------------------------------------------------------------ pages come in

    def add_pages(self, node: Node, request: Request, start: int, stop: int) -> Node:
        """The request's pages [start, stop) are full and committed: make them findable after
        `node`. Returns the node of the last one."""
        tree = self.tree
        for index, tokens in enumerate(tree.page_tokens(request, start, stop), start):
            key = tree.key(request, index)
            node = node.children.get(key) or tree.add(node, key, tokens)
            for group, pages in enumerate(request.pages):
                page = pages[index]
                if page and page != node.pages[group] and page not in self._twin_of:
                    self._offer(node, group, page)
        return node

    def add_tail(self, parent: Node, request: Request, index: int, num_tokens: int) -> None:
        """The request ends with `num_tokens` committed tokens in page `index`: make them
        findable."""
        start = index * self.allocator.page_size
        tokens = self.tree.token_bytes(request, start, start + num_tokens)
        pages = [group[index] for group in request.pages]
        alike, common = self.tree.find_alike(parent, tokens, 1)
        if alike is not None and common == num_tokens:
            self.touch(alike)
            return
        key = child_key(parent.key, tokens)
        if key in parent.children or not all(pages):
            return
        if alike is not None and common * TOKEN_BYTES == len(alike.tokens):
            self.remove(alike)  # a tail, and the new one has all its tokens and more
        node = self.tree.add(parent, key, tokens)
        for group, page in enumerate(pages):
            self._attach(node, group, page)

    def load(self, node: Node, group: int, page: int) -> None:
        """Bring a node's KV back from its host slot, which is pinned, into `page`."""
        self.moves.fill(page, Origin(slot=node.slots[group]))
        self._counts.loaded_pages += 1
        self._attach(node, group, page)

    def copy(self, origin: Origin, page: int) -> None:
        """Fill `page` from where only part of it is shared."""
        self.moves.fill(page, origin)
        self._counts.copied_pages += 1

    def touch(self, node: Node) -> None:
        """A node was useful."""
        for page in node.pages:
            if page:
                self.allocator.touch(page)

    # ------------------------------------------------------------------ pages go

    def release(self, pages: list[int]) -> None:
        """A request lets go of pages; those to be evicted first come first."""
        if self._twins:
            for page in pages:
                if self.allocator.ref_count(page) == 1:
                    self._settle_twins(page)
        self.allocator.release(pages)

    def evict_oldest(self) -> None:
        """Free the idle page that was used least recently; its content may go to a host slot."""
        page = self.allocator.free_oldest_idle()
        place = self._places[page]
        assert place is not None, f"page {page} is idle, yet nobody can find it"
        node, group = place
        node.pages[group] = 0
        self._places[page] = None
        self._counts.evicted_pages += 1
        if self.tree.is_tail(node):
            self.remove(node)
            return
        slot = node.slots[group]
        if slot != NO_SLOT:
            self.slots.left_pool(slot)
        elif self.stores_pages and self.slots.num_slots:
            self._store(node, group, page)
        if node.is_alive and not node.holds(group):
            self._lost(node, group)

    def remove(self, node: Node) -> list[int]:
        """Make a node and all below it unfindable. Returns the pages that are free by that."""
        freed: list[int] = []
        for gone in self.tree.remove(node):
            for group, page in enumerate(gone.pages):
                if page:
                    if self.allocator.is_idle(page):
                        freed.append(page)
                    self._detach(gone, group)
                for twin in self._twins.pop((gone, group), ()):
                    del self._twin_of[twin]
                if gone.slots[group] != NO_SLOT:
                    self.slots.free(gone.slots[group])
        return freed

    # ------------------------------------------------------------------ parts

    def _attach(self, node: Node, group: int, page: int) -> None:
        assert self._places[page] is None, f"page {page} is findable already"
        node.pages[group] = page
        self._places[page] = (node, group)
        self.allocator.keep(page)

    def _detach(self, node: Node, group: int) -> None:
        page = node.pages[group]
        node.pages[group] = 0
        self._places[page] = None
        self.allocator.drop(page)

    def _offer(self, node: Node, group: int, page: int) -> None:
        """A running request has `page` for a place of the tree."""
        present = node.pages[group]
        if present and self.allocator.ref_count(present) > 0:
            self._twins.setdefault((node, group), []).append(page)
            self._twin_of[page] = (node, group)
            return
        if present:  # idle: the one that is in use anyway replaces it
            self._detach(node, group)
        self._attach(node, group, page)
        if node.slots[group] != NO_SLOT:
            self.slots.back_in_pool(node.slots[group])

    def _settle_twins(self, page: int) -> None:
        """The last holder of `page` leaves: a twin takes its place, or it is nobody's twin now."""
        place = self._twin_of.pop(page, None)
        if place is not None:
            self._remove_twin(place, page)
            return
        place = self._places[page]
        if place is not None and place in self._twins:
            twin = self._twins[place][0]
            del self._twin_of[twin]
            self._remove_twin(place, twin)
            self._detach(*place)
            self._attach(*place, twin)

    def _remove_twin(self, place: tuple[Node, int], page: int) -> None:
        twins = self._twins[place]
        twins.remove(page)
        if not twins:
            del self._twins[place]

    def _store(self, node: Node, group: int, page: int) -> None:
        """Keep an evicted page's content in a host slot, if one is free or can be made so."""
        slot = self.slots.take(node, group)
        if slot == NO_SLOT:
            oldest = self.slots.oldest()
            if oldest == NO_SLOT:
                return
            other, its_group = self.slots.owner(oldest)
            self.slots.free(oldest)
            if other.is_alive and not other.holds(its_group):
                self._lost(other, its_group)
            if not node.is_alive:  # it was lost with the other
                return
            slot = self.slots.take(node, group)
        self.moves.store(page, slot)
        self._counts.stored_pages += 1

    def _lost(self, node: Node, group: int) -> None:
        """A node has no KV of this group any more."""
        if self.windows[group] is None:
            self.remove(node)
        else:
            self.tree.prune(node)

    # ------------------------------------------------------------------ invariants

    def is_findable(self, page: int) -> bool:
        return self._places[page] is not None or page in self._twin_of

    def stands_for(self, page: int, node: Node, group: int) -> bool:
        """Whether `page` is the node's, or its twin; 0 stands for anything."""
        place = self._places[page] or self._twin_of.get(page)
        return page == 0 or place == (node, group)

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, pages and slots agree and the order is as promised."""
        self.slots.check_integrity()
        order = self.allocator.idle_order()
        found: dict[int, tuple[Node, int]] = {}
        slots = 0
        nodes = list(self.tree.roots)
        for node in nodes:
            nodes.extend(node.children.values())
            for group, page in enumerate(node.pages):
                slots += node.slots[group] != NO_SLOT
                if page:
                    assert page not in found, f"page {page} stands for two nodes"
                    found[page] = (node, group)
            if node.parent is not None:
                self._check_node(node, order)
        assert slots == self.slots.num_owned, "a slot is owned by a node outside the tree"
        for page in range(self.allocator.num_pages):
            assert self._places[page] == found.get(page), f"page {page} has a wrong place"
        assert order.keys() <= found.keys(), "an idle page cannot be found"
        self._check_twins()

    def _check_twins(self) -> None:
        assert sum(map(len, self._twins.values())) == len(self._twin_of), "a twin is lost"
        for twin, (node, group) in self._twin_of.items():
            assert twin in self._twins[node, group], "a twin is lost"
            assert node.is_alive, "a twin of a node that is gone"
            assert node.pages[group], "a twin of a page that is gone"
            assert self.allocator.ref_count(twin) > 0, "nobody holds a twin"
            assert self._places[twin] is None, "a twin is findable itself"

    def _check_node(self, node: Node, order: dict[int, int]) -> None:
        parent = node.parent
        assert parent is not None
        assert node.is_alive, "a node of the tree counts as gone"
        assert node.is_needed(), "a node that nobody needs"
        assert parent.children[node.key] is node, "a node is misplaced"
        assert child_key(parent.key, node.tokens) == node.key, "a node has a wrong key"
        is_tail = self.tree.is_tail(node)
        assert not (is_tail and node.children), "a tail has children"
        for group, window in enumerate(self.windows):
            page, above = node.pages[group], parent.pages[group]
            if is_tail:
                assert page in order, "a tail is idle, and in the pool"
            if window is not None:
                continue
            assert node.holds(group), "a lost node is still in the tree"
            if parent.parent is None or not page:
                continue
            assert above, "a page is in the pool and its parent's is not"
            if above in order:
                assert page in order, "a page is held and its parent's is not"
                assert order[page] < order[above], "a parent would be evicted first"
