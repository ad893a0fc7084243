"""Progress of an offline batch on stderr: a bar in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxserve.engine.offline_batch import BatchProgress

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0  # between two lines where no terminal is


@contextmanager
def batch_display(what: str, progress: BatchProgress) -> Iterator[Callable[[BatchProgress], None]]:
    """Yields a function that is told of progress, often; the last state is shown at the end.

    Rates are of prompt and output tokens since now, without what `progress` starts with.
    """
    from rich.console import Console  # only who shows progress waits for its import

    console = Console(stderr=True)
    began = time.monotonic()
    if not console.is_terminal:
        with _lines(console, what, progress, began) as tell:
            yield tell
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[rates]}"),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task(
            what, total=progress.num_jobs, completed=progress.finished_jobs, rates=""
        )

        def tell(now: BatchProgress) -> None:
            bar.update(task, completed=now.finished_jobs, rates=_rates(now, began))

        yield tell


@contextmanager
def _lines(
    console: "Console", what: str, progress: BatchProgress, began: float
) -> Iterator[Callable[[BatchProgress], None]]:
    last = began

    def show(now: BatchProgress) -> None:
        total = "?" if now.num_jobs is None else now.num_jobs
        line = f"{what} {now.finished_jobs}/{total}, {_rates(now, began)}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def tell(now: BatchProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            show(now)

    try:
        yield tell
    finally:
        show(progress)


def _rates(now: BatchProgress, began: float) -> str:
    seconds = max(time.monotonic() - began, 1e-3)
    rates = (
        f"in {now.prompt_tokens / seconds:.0f} tok/s, out {now.output_tokens / seconds:.0f} tok/s"
    )
    return f"{rates}, {now.failed_jobs} failed" if now.failed_jobs else rates
