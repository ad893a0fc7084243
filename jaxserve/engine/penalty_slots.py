"""Which row of the device's token counts belongs to which request."""

import numpy as np

from jaxserve.engine.request import Request


class PenaltySlots:
    """Hands out slots 1 to num_slots - 1 to running requests with penalties; slot 0 is nobody's.

    A slot's counts live on the device and are advanced there, so a request that loses its slot
    (finished, preempted) gets its counts rebuilt from its tokens with the next one.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, 0, -1))
        self._owner: dict[int, Request] = {}

    def release_unneeded(self, running: tuple[Request, ...]) -> None:
        """Take back the slots of requests that do not run any more."""
        if not self._owner:
            return
        keep = {id(request) for request in running}
        for slot, request in tuple(self._owner.items()):
            if id(request) not in keep:
                self.release(slot)

    def release(self, slot: int) -> None:
        """Take back one slot."""
        self._owner.pop(slot).sampling_slot = 0
        self._free.append(slot)

    def release_all(self) -> None:
        """The device's counts are lost: everybody needs a new slot."""
        for slot in tuple(self._owner):
            self.release(slot)

    def assign(self, request: Request) -> int:
        """A slot for a request that has none. There are as many slots as rows, so one is free."""
        slot = self._free.pop()
        self._owner[slot] = request
        request.sampling_slot = slot
        return slot


def token_counts(request: Request, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(in_prompt [V] bool, output_counts [V] int32) of a request's tokens so far."""
    in_prompt = np.zeros(vocab_size, bool)
    in_prompt[list(request.prompt_token_ids)] = True
    counts = np.bincount(request.output_token_ids, minlength=vocab_size).astype(np.int32)
    return in_prompt, counts
