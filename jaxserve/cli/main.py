"""The `jaxserve` command. Each sub-command lives in a module that imports JAX only when it runs."""

from importlib.metadata import version
from typing import Annotated

import typer

from jaxserve.cli import (
    audit_speculation,
    batch,
    bench,
    chat,
    evaluate,
    generate,
    plan,
    pull,
    serve,
)
from jaxserve.cli.garbage import collect_rarely

app = typer.Typer(
    name="jaxserve",
    help="Serve large language models with JAX: an OpenAI-compatible server, a chat, a batch "
    "runner and a benchmark. Start with: jaxserve pull smollm2, then jaxserve serve smollm2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jaxserve {version('jaxserve')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


for module in (serve, chat, generate, batch, pull, plan, bench, evaluate, audit_speculation):
    module.register(app)


def main() -> None:
    """Entry point of the console script."""
    collect_rarely()
    app()
