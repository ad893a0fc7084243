"""Which host-memory slot keeps which evicted page. Plain Python; the bytes are moved elsewhere.

A slot holds one page of one group. When all are taken, the one whose page was evicted longest ago
makes room; slots whose page is back in the pool go first, because nothing is lost with them.
"""

from collections import OrderedDict

from jaxserve.engine.page_moves import NO_SLOT
from jaxserve.engine.page_tree import Node


class HostSlots:
    """num_slots slots, each free, or owned by one (node, group).

    Pinned slots are read by a load of the batch that is being planned: they are neither handed out
    nor found by `oldest` until `unpin`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners: dict[int, tuple[Node, int]] = {}
        self._order: OrderedDict[int, None] = OrderedDict()  # owned, not pinned; first to go first
        self._pinned: set[int] = set()

    @property
    def num_owned(self) -> int:
        return len(self._owners)

    def owner(self, slot: int) -> tuple[Node, int]:
        return self._owners[slot]

    def oldest(self) -> int:
        """The owned slot that is to make room first, or NO_SLOT."""
        return next(iter(self._order), NO_SLOT)

    def take(self, node: Node, group: int) -> int:
        """Give a free slot to (node, group), or NO_SLOT if none is free."""
        if not self._free:
            return NO_SLOT
        slot = self._free.pop()
        self._owners[slot] = (node, group)
        self._order[slot] = None
        node.slots[group] = slot
        return slot

    def free(self, slot: int) -> None:
        """The owner gives its slot up."""
        node, group = self._owners.pop(slot)
        node.slots[group] = NO_SLOT
        if slot not in self._pinned:  # else it is free after the batch that reads it
            del self._order[slot]
            self._free.append(slot)

    def left_pool(self, slot: int) -> None:
        """The page was evicted again; the slot is now the one place that has it."""
        if slot not in self._pinned:
            self._order.move_to_end(slot)

    def back_in_pool(self, slot: int) -> None:
        """The page is in the pool too."""
        if slot not in self._pinned:
            self._order.move_to_end(slot, last=False)

    def pin(self, slot: int) -> None:
        self._pinned.add(slot)
        self._order.pop(slot, None)

    def unpin_all(self) -> None:
        """The batch is complete: what comes now is carried out after its loads."""
        for slot in self._pinned:
            if slot not in self._owners:
                self._free.append(slot)
                continue
            node, group = self._owners[slot]
            self._order[slot] = None
            if node.pages[group]:
                self._order.move_to_end(slot, last=False)
        self._pinned.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free, owned, or pinned by a load."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot in range(self.num_slots):
            owned = slot in self._owners
            assert (slot in free) + (owned or slot in self._pinned) == 1, f"slot {slot} is lost"
            assert (slot in self._order) == (owned and slot not in self._pinned)
            if owned:
                node, group = self._owners[slot]
                assert node.is_alive, f"slot {slot} belongs to a node that is gone"
                assert node.slots[group] == slot, f"slot {slot} has a wrong owner"
