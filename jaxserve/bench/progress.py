"""A progress bar on stderr for a benchmark; a line at the start where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many more are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what} ({total})", highlight=False, markup=False, soft_wrap=True)
        yield _say_nothing
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda more: bars.advance(task, more)


def _say_nothing(_: int) -> None:
    pass
