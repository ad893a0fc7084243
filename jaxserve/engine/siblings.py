"""Requests that share a prompt: the choices of one request, and forks.

Computing a prompt once is enough. While one of a family runs its prompt, the others wait; once it
has, they enter and share its pages. If it ends or is preempted before, the next of them runs the
prompt: whoever waits, waits for a request that runs, and a running request gets ahead.
"""

from jaxserve.engine.queue_entry import Entry
from jaxserve.engine.request import Request


class Siblings:
    """The running requests of every family."""

    def __init__(self) -> None:
        self._running: dict[str, list[Entry]] = {}

    def add(self, entry: Entry) -> None:
        self._running.setdefault(entry.family, []).append(entry)

    def remove(self, entry: Entry) -> None:
        family = self._running[entry.family]
        family.remove(entry)
        if not family:
            del self._running[entry.family]

    def holds(self, entry: Entry) -> bool:
        """Whether a waiting request had better wait until a sibling has run the prompt."""
        family = self._running.get(entry.family)
        if family is None:
            return False
        enough = len(entry.request.prompt_token_ids) - 1
        return all(sibling.request.num_computed < enough for sibling in family)

    def source(self, entry: Entry) -> Request | None:
        """The running sibling that has computed most of what a waiting request begins with."""
        family = self._running.get(entry.family)
        if family is None:
            return None
        return max((sibling.request for sibling in family), key=lambda r: shared(entry.request, r))

    def members(self) -> set[Entry]:
        """All that run. For tests."""
        return {entry for family in self._running.values() for entry in family}


def shared(request: Request, source: Request) -> int:
    """Tokens of `request`, at most its max_shared, that `source` has computed.

    Their prompts are the same.
    """
    most = min(source.num_computed, request.max_shared)
    prompt = len(request.prompt_token_ids)
    if most <= prompt:
        return most
    ours = request.output_token_ids[: most - prompt]
    theirs = source.output_token_ids[: most - prompt]
    if ours == theirs:
        return most
    return prompt + next(
        at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]
    )
