"""The page contents that must be moved before the next step. Plain Python.

Moves are collected while a step is planned and carried out together: all stores, then all copies
(every source is read before anything is written), then all loads (`plan.Transfers`). Meanwhile
pages and slots change hands in any order, so a move is written down in terms of what pages and
slots held *before the batch*. That is always possible:

- What a page is to hold is either what it holds already, or what a move of this batch brings.
  `origin` says which, and a copy names that origin, never a page that is still to be filled.
- A page that a move of this batch fills is not stored: its content is where it comes from.
- A page that changes hands loses the moves into it (`forget_pages`); moves out of it were written
  down with what it held before the batch and stay right, because stores and copies read first.
- A slot that a load of this batch reads is pinned: no store may overwrite it (`HostSlots`).
"""

from typing import NamedTuple

from jaxserve.engine.plan import Transfers

NO_SLOT = -1


class Origin(NamedTuple):
    """Where a page's content is before the batch: in a page of the pool, or in a host slot."""

    page: int = 0
    slot: int = NO_SLOT


class PageMoves:
    """The moves of one batch. Every page is filled once, every slot is stored to once."""

    def __init__(self) -> None:
        self._stores: dict[int, int] = {}  # slot -> page
        self._copies: dict[int, int] = {}  # page to -> page from
        self._loads: dict[int, int] = {}  # page -> slot

    def origin(self, page: int) -> Origin:
        """Where the content that `page` has, or will have after the batch, is before it."""
        slot = self._loads.get(page)
        if slot is not None:
            return Origin(slot=slot)
        return Origin(page=self._copies.get(page, page))

    def fill(self, page: int, origin: Origin) -> None:
        """`page` shall hold what is at `origin`. A slot must be pinned."""
        assert self.origin(page) == Origin(page=page), f"page {page} is filled twice"
        if origin.slot != NO_SLOT:
            self._loads[page] = origin.slot
        elif origin.page != page:  # else it got the very page that it was to be copied from
            self._copies[page] = origin.page

    def store(self, page: int, slot: int) -> None:
        """`slot` shall hold what `page` holds, and nothing that it was to hold before."""
        assert self.origin(page) == Origin(page=page), f"page {page} does not hold its content yet"
        self._stores[slot] = page

    def forget_pages(self, pages: list[int]) -> None:
        """`pages` changed hands: nobody wants what was to be moved into them."""
        if self._loads or self._copies:
            for page in pages:
                self._loads.pop(page, None)
                self._copies.pop(page, None)

    def take(self) -> Transfers:
        """The batch; the next one begins empty."""
        transfers = Transfers(
            stores=tuple((page, slot) for slot, page in self._stores.items()),
            copies=tuple((source, page) for page, source in self._copies.items()),
            loads=tuple((slot, page) for page, slot in self._loads.items()),
        )
        self._stores.clear()
        self._copies.clear()
        self._loads.clear()
        return transfers
