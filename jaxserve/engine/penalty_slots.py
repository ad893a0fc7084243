"""Which row of the device's token counts belongs to which request."""

from dataclasses import dataclass

import numpy as np

from jaxserve.engine.request import Request


@dataclass(frozen=True)
class _Owner:
    """epoch: the request's preemptions when it got the slot."""

    request: Request
    epoch: int


class PenaltySlots:
    """Hands out slots 1 to num_slots - 1 to running requests with penalties; slot 0 is nobody's.

    A slot's counts live on the device and are advanced there, so a request that loses its slot
    (finished, preempted) gets its counts rebuilt from its tokens with the next one. A preempted
    request loses it even if it runs again at once: a draw in flight was counted and then dropped.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, 0, -1))
        self._owners: dict[int, _Owner] = {}

    def release_unneeded(self, running: tuple[Request, ...]) -> None:
        """Take back the slots of requests that do not run any more, or not without a break."""
        if not self._owners:
            return
        keep = {(id(request), request.num_preemptions) for request in running}
        for slot, owner in tuple(self._owners.items()):
            if (id(owner.request), owner.epoch) not in keep:
                self._release(slot)

    def release_all(self) -> None:
        """The device's counts are lost: everybody needs a new slot."""
        for slot in tuple(self._owners):
            self._release(slot)

    def assign(self, request: Request) -> int:
        """A slot for a request that has none. There are as many slots as rows, so one is free."""
        slot = self._free.pop()
        self._owners[slot] = _Owner(request, request.num_preemptions)
        request.sampling_slot = slot
        return slot

    def _release(self, slot: int) -> None:
        self._owners.pop(slot).request.sampling_slot = 0
        self._free.append(slot)


def token_counts(request: Request, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(in_prompt [V] bool, output_counts [V] int32) of a request's tokens so far."""
    in_prompt = np.zeros(vocab_size, bool)
    in_prompt[list(request.prompt_token_ids)] = True
    counts = np.bincount(request.output_token_ids, minlength=vocab_size).astype(np.int32)
    return in_prompt, counts
