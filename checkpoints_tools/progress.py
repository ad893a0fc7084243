"""How a training is watched: a bar with loss and acceptance, or a line now and then in a log."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_SECONDS = 30.0
_SMOOTHING = 0.95  # of the loss that is shown


@contextmanager
def training_progress(
    what: str, total: int
) -> Iterator[Callable[[int, float, Mapping[str, Any] | None], None]]:
    """Yields what `fit` reports to."""
    console = Console(stderr=True)
    watched = console.is_terminal
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[said]}"),
    )  # fmt: skip
    smooth, last_line, scored = None, time.monotonic(), ""

    def report(step: int, loss: float, scores: Mapping[str, Any] | None) -> None:
        nonlocal smooth, last_line, scored
        smooth = loss if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * loss
        if scores is not None:
            scored = f"; held out: {acceptance_text(scores)}"
        said = f"loss {smooth:.3f}{scored}"
        if watched:
            bar.update(task, completed=step, said=said)
        elif scores is not None or time.monotonic() - last_line > _LINE_SECONDS:
            line = f"{what}: step {step} of {total}, {said}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            last_line = time.monotonic()

    with Progress(*columns, console=console, disable=not watched) as bar:
        task = bar.add_task(what, total=total, said="")
        yield report


def acceptance_text(scores: Mapping[str, Any]) -> str:
    """The scores of `held_out.summary` on a line."""
    parts = []
    for way in ("greedy", "sampled"):
        rates = " ".join(f"{rate:.3f}" for rate in scores[way]["acceptance"])
        parts.append(f"{way} {rates} = {scores[way]['tokens_per_round']:.2f} tokens a round")
    return ", ".join(parts)
