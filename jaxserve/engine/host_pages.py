"""The host-memory tier of the KV pool: the bytes of pages that were evicted from it.

Which slot keeps which page is decided elsewhere (host_slots.py); here the bytes are moved. A store
is a read that nobody waits for, because it runs on the device after the step in flight: its handle
is kept, and the bytes are put into their slots once they are there.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.core.kv_pool import KVPool, shapes_of_pages
from jaxserve.engine.page_programs import BATCH, PageContents, PagesHandle
from jaxserve.engine.plan import Transfers
from jaxserve.engine.runner import Runner

# Pages on their way to the host: they take memory of the device. When there are more, somebody
# waits.
_MOST_PENDING = 8 * BATCH


@dataclass(frozen=True)
class _Store:
    """Pages on their way into slots."""

    slots: tuple[int, ...]
    handle: PagesHandle


class HostPages:
    """num_slots slots of one page each; their memory is taken as they are first used. Used by the
    engine's thread alone.

    waited: seconds spent waiting for pages on their way, and so for the step before them.
    """

    def __init__(self, num_slots: int, pool: KVPool) -> None:
        """pool: the pool, or its shapes: what a page is."""
        self.num_slots = num_slots
        self._slots: PageContents = tuple(
            np.empty(leaf.shape, leaf.dtype)
            for leaf in jax.tree.leaves(shapes_of_pages(pool, num_slots))
        )
        self._pending: deque[_Store] = deque()
        self.waited = 0.0

    def store(self, slots: Sequence[int], handle: PagesHandle) -> None:
        """Slot slots[i] shall hold page i of what `handle` brings. A later store of the same slot
        replaces it."""
        self._pending.append(_Store(tuple(slots), handle))
        self.settle(waiting=False)
        while sum(len(store.slots) for store in self._pending) > _MOST_PENDING:
            self._settle()

    def load(self, slots: Sequence[int]) -> PageContents:
        """A copy of what the slots hold, in the form `Runner.write_pages` takes."""
        wanted = set(slots)
        self.settle(waiting=any(wanted.intersection(store.slots) for store in self._pending))
        at = np.array(slots, np.intp)
        return tuple(leaf[at] for leaf in self._slots)

    def settle(self, *, waiting: bool = True) -> None:
        """Put what is on its way into its slots; without waiting, only what has come."""
        while self._pending and (waiting or self._pending[0].handle.is_ready):
            self._settle()

    def clear(self) -> None:
        """Forget what is on its way: the device has lost it."""
        self._pending.clear()

    def _settle(self) -> None:
        store = self._pending.popleft()
        began = time.monotonic()
        new = store.handle.result()
        self.waited += time.monotonic() - began
        at = np.array(store.slots, np.intp)
        for leaf, pages in zip(self._slots, new, strict=True):
            leaf[at] = pages


def slots_in(memory: int, page_bytes: int) -> int:
    """How many pages so many bytes of host memory keep."""
    return memory // page_bytes


def apply_transfers(
    runner: Runner, host_pages: HostPages, transfers: Transfers
) -> tuple[int, float]:
    """Dispatch what must be moved before the next step: stores, then copies, then loads.

    Returns (pages moved to and from the host, seconds this thread worked for them), which
    `StepTimes` takes. It waits only to load what was stored a moment ago, or when too many pages
    are on their way.
    """
    began, waited = time.monotonic(), host_pages.waited
    host_pages.settle(waiting=False)
    for first in range(0, len(transfers.stores), BATCH):
        part = transfers.stores[first : first + BATCH]
        handle = runner.read_pages([page for page, _ in part])
        host_pages.store([slot for _, slot in part], handle)
    if transfers.copies:
        runner.copy_pages(transfers.copies)
    for first in range(0, len(transfers.loads), BATCH):
        part = transfers.loads[first : first + BATCH]
        contents = host_pages.load([slot for slot, _ in part])
        runner.write_pages([page for _, page in part], contents)
    worked = time.monotonic() - began - (host_pages.waited - waited)
    return len(transfers.stores) + len(transfers.loads), worked
