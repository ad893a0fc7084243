"""Options that the training commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from checkpoints_tools.fit import Settings

_PANEL = "Training"

TargetModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="The target: a pulled model's name, a .gguf file or a folder."
    ),
]
Text = Annotated[Path, typer.Option("--text", help="UTF-8 file to learn from.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the result.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the text.", rich_help_panel=_PANEL)]
LearningRate = Annotated[
    float, typer.Option(min=1e-8, max=1.0, help="Of AdamW, at its peak.", rich_help_panel=_PANEL)
]
Window = Annotated[int, typer.Option(min=16, help="Tokens of a window.", rich_help_panel=_PANEL)]
Batch = Annotated[int, typer.Option(min=1, help="Windows a step.", rich_help_panel=_PANEL)]
HeldOut = Annotated[
    float,
    typer.Option(
        min=0.001, max=0.5, help="Share of the text that is only scored.", rich_help_panel=_PANEL
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=64, help="Take the text's first tokens.", rich_help_panel=_PANEL)
]
Seed = Annotated[int, typer.Option(help="Of first weights and order.", rich_help_panel=_PANEL)]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads to compute on.", rich_help_panel=_PANEL)
]


def settings(epochs: int, batch: int, learning_rate: float, seed: int) -> "Settings":
    """What `fit` is given."""
    from checkpoints_tools.fit import Settings

    return Settings(epochs=epochs, batch=batch, learning_rate=learning_rate, seed=seed)
