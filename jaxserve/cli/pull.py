"""`jaxserve pull` and `jaxserve models`: fetch models, and see which are there."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from jaxserve.cli.terminal import with_clear_errors
from jaxserve.loading.hub import list_models, pull
from jaxserve.loading.model_cache import home, megabytes


class TerminalReporter:
    """Says on stderr what a pull does; draws a progress bar when stderr is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            SpeedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "TerminalReporter":
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        if not self._tasks:
            self._bars.start()  # not before: the Hub's client draws bars of its own
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=min(done, total), total=total)


def register(app: typer.Typer) -> None:
    """Add the commands `pull` and `models`."""
    app.command("pull")(with_clear_errors(pull_command))
    app.command("models")(models_command)


def pull_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="smollm2, gemma3-270m, or hf:org/name[@revision][:GGUF variant].",
        ),
    ],
) -> None:
    """Fetch models into the cache ($JAXSERVE_HOME, or the platform's cache folder).

    A model that is already there is checked and kept; an interrupted pull continues.
    """
    console = Console(stderr=True)
    for name in names:
        with TerminalReporter(console) as report:
            path = pull(name, report)
        typer.echo(path)


def models_command() -> None:
    """List the models that can be pulled by name and the ones that are in the cache."""
    typer.echo(f"models in {home()}")
    for entry in list_models():
        typer.echo(f"\n{entry.name}  ({megabytes(entry.size)})  {entry.about}")
        place = entry.path or f"not pulled yet; type: jaxserve pull {entry.name}"
        typer.echo(f"    {place}")
