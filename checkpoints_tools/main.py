"""The `checkpoints_tools` command. Each sub-command imports JAX only when it runs."""

import typer

from checkpoints_tools import distill, inspect, train_draft, verify

app = typer.Typer(
    name="checkpoints_tools",
    help="Make drafts for speculative decoding, and look into checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (train_draft, distill, inspect, verify):
    module.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
