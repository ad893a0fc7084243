"""The tree of cached pages: which tokens they hold, and how a request finds them. Plain Python.

A node stands for one page of tokens after everything its ancestors stand for. Its key is a
128-bit hash of its parent's key and its token ids, so it names the whole sequence; a root's key
hashes what must be equal for KV to be shared at all: the kind of KV, the salt and the adapter. A
node with fewer tokens than a page is a *tail*: the partly filled last page of a request that has
ended. Nobody finds it by its key and it has no children.
"""

from array import array
from hashlib import blake2b
from itertools import islice

from jaxserve.engine.page_moves import NO_SLOT
from jaxserve.engine.request import Request

KEY_BYTES = 16
TOKEN_BYTES = 4
CHILDREN_LOOKED_AT = 8  # for a page that begins alike; the newest ones


class Node:
    """tokens: int32 token ids as bytes. pages, slots: per group, where its KV is in the pool and
    in host memory; 0 and NO_SLOT: nowhere. pins: requests whose last full page it is. is_alive:
    still in the tree."""

    __slots__ = ("children", "is_alive", "key", "pages", "parent", "pins", "slots", "tokens")

    def __init__(self, key: bytes, parent: "Node | None", tokens: bytes, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.pages = [0] * num_groups
        self.slots = [NO_SLOT] * num_groups
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.is_alive = True

    def holds(self, group: int) -> bool:
        """Whether its KV of that group is anywhere."""
        return self.pages[group] > 0 or self.slots[group] != NO_SLOT

    def holds_all(self) -> bool:
        return all(map(self.holds, range(len(self.pages))))

    def is_needed(self) -> bool:
        """Whether it must stay: it holds KV, or somebody comes after it."""
        if self.children or self.pins:
            return True
        return any(self.pages) or any(slot != NO_SLOT for slot in self.slots)


class PageTree:
    """All nodes, by root and key."""

    def __init__(self, page_size: int, num_groups: int, kind: str) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self._kind = kind
        self._roots: dict[bytes, Node] = {}

    @property
    def roots(self) -> tuple[Node, ...]:
        return tuple(self._roots.values())

    def is_tail(self, node: Node) -> bool:
        return len(node.tokens) < self._page_size * TOKEN_BYTES

    def find_root(self, request: Request) -> Node | None:
        return self._roots.get(self._root_key(request))

    def root(self, request: Request) -> Node:
        """The root of everything the request may share, made if it is not there."""
        key = self._root_key(request)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, None, b"", self._num_groups)
        return root

    def path(self, request: Request, max_pages: int) -> list[Node]:
        """The nodes of the request's first full pages, as far as there are any."""
        path: list[Node] = []
        node = self.find_root(request)
        while node is not None and len(path) < max_pages:
            node = node.children.get(self.key(request, len(path)))
            if node is not None:
                path.append(node)
        return path

    def find_alike(self, parent: Node, tokens: bytes, min_tokens: int) -> tuple[Node | None, int]:
        """The child that has KV in all groups and begins with most of `tokens`, and how many.

        Looks at a bounded number of children; (None, 0) if none shares min_tokens.
        """
        best, longest = None, min_tokens - 1
        start = tokens[: min_tokens * TOKEN_BYTES]
        for child in islice(reversed(parent.children.values()), CHILDREN_LOOKED_AT):
            if child.tokens.startswith(start):
                common = _common_tokens(child.tokens, tokens)
                if common > longest and child.holds_all():
                    best, longest = child, common
        return (best, longest) if best is not None else (None, 0)

    def add(self, parent: Node, key: bytes, tokens: bytes) -> Node:
        node = Node(key, parent, tokens, self._num_groups)
        parent.children[key] = node
        return node

    def remove(self, node: Node) -> list[Node]:
        """Take a node and all below it out of the tree, and ancestors that nobody needs now.

        Returns the nodes below it, itself included; they still say where their KV is.
        """
        assert node.parent is not None, "a root leaves by `prune`"
        del node.parent.children[node.key]
        removed = [node]
        for gone in removed:  # grows while it is read
            gone.is_alive = False
            removed.extend(gone.children.values())
        self.prune(node.parent)
        return removed

    def prune(self, node: Node) -> None:
        """Take out a node that nobody needs, and its ancestors like it."""
        while node.is_alive and not node.is_needed():
            node.is_alive = False
            if node.parent is None:
                del self._roots[node.key]
                return
            del node.parent.children[node.key]
            node = node.parent

    # ------------------------------------------------------------------ keys

    def page_tokens(self, request: Request, start: int, stop: int) -> list[bytes]:
        """The token ids of the request's full pages [start, stop)."""
        size = self._page_size
        tokens = self.token_bytes(request, start * size, stop * size)
        size *= TOKEN_BYTES
        return [tokens[place : place + size] for place in range(0, len(tokens), size)]

    def token_bytes(self, request: Request, start: int, stop: int) -> bytes:
        return array("i", request.token_ids(start, stop)).tobytes()

    def key(self, request: Request, index: int) -> bytes:
        """The key of the request's page `index`, a full one; computed once (page_hashes)."""
        if index >= len(request.page_hashes):
            self._extend_keys(request, index + 1)
        return request.page_hashes[index]

    def _extend_keys(self, request: Request, num_pages: int) -> None:
        """Twice as many keys as there are, or num_pages: a long prompt is read in few pieces."""
        hashes = request.page_hashes
        start = len(hashes)
        stop = max(num_pages, min(2 * start, request.num_tokens // self._page_size))
        key = hashes[-1] if hashes else self._root_key(request)
        for tokens in self.page_tokens(request, start, stop):
            key = child_key(key, tokens)
            hashes.append(key)

    def _root_key(self, request: Request) -> bytes:
        parts = (self._kind, request.cache_salt, str(request.adapter_id))
        named = "".join(f"{len(part)}:{part}" for part in parts)  # no two triples read alike
        return blake2b(named.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def child_key(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def _common_tokens(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right)) // TOKEN_BYTES
    for index in range(length):
        place = slice(index * TOKEN_BYTES, (index + 1) * TOKEN_BYTES)
        if left[place] != right[place]:
            return index
    return length
