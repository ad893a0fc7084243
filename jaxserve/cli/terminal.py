"""How the commands talk: progress and errors on stderr, answers on stdout, no tracebacks."""

import functools
import logging
from collections.abc import Callable

import typer

from jaxserve.errors import EngineDeadError, InvalidRequestError, ModelLoadError, PullError

_USER_ERRORS = (InvalidRequestError, EngineDeadError, ModelLoadError, PullError)


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(text, err=True)


def with_clear_errors[**P](command: Callable[P, None]) -> Callable[P, None]:
    """The command, with what a user can correct as one line and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except _USER_ERRORS as error:
            say(f"error: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped


def set_up_logging() -> None:
    """Warnings on stderr: time, level, place, text."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
