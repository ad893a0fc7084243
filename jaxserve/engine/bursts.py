"""How many decode steps one plan runs in a row, and when drafts may run.

Between two steps the host fetches tokens, plans and dispatches. Where a step takes some
milliseconds that is a good part of it, and on a machine of few cores it takes the cores from the
step that is running. So while nobody waits and no prompt runs, several steps go in one dispatch.
What it costs: whoever comes waits for their end, and tokens of a stream come together. Hence a
burst takes at most BURST_SECONDS, and no request's last token is passed.
"""

from collections.abc import Callable, Sequence

from jaxserve.engine.queue_entry import Entry
from jaxserve.engine.step_times import StepTimes

BURST_SECONDS = 0.1
MAX_BURST = 8  # an eighth of the host's share is left; windows' pages are kept for so many tokens


def burst_steps(
    running: Sequence[Entry],
    most: int,
    most_rows: int,
    step_times: StepTimes,
    has_room: Callable[[Entry, int], bool],
) -> int:
    """The steps of the next plan, at least 1 and at most `most`; 1 if more than most_rows run.

    has_room: lets an entry's lists cover so many tokens, if pages are free.
    """
    if most <= 1 or len(running) > most_rows or any(entry.num_unscheduled > 1 for entry in running):
        return 1
    decoding = [entry for entry in running if entry.length < entry.longest]
    seconds = step_times.decode_seconds(len(decoding))
    if not decoding or seconds is None:
        return 1
    steps = min(most, *(entry.longest - entry.length for entry in decoding))
    if seconds * steps > BURST_SECONDS:
        steps = max(1, int(BURST_SECONDS / seconds))
    enough = all(has_room(entry, entry.length + steps - 1) for entry in decoding)
    return steps if enough else 1


def may_verify(running: Sequence[Entry], max_rows: int, num_waiting: int) -> bool:
    """Whether drafts may run: no prompt does, and nobody who waits could enter."""
    prompts = any(entry.num_unscheduled > 1 for entry in running)
    return not prompts and (num_waiting == 0 or len(running) >= max_rows)
