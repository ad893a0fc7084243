"""`checkpoints_tools distill`: a small draft model from a slice of the target's layers."""

from typing import Annotated

import typer

from checkpoints_tools import options as opt
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.core.threads import use_threads
from jaxserve.errors import InvalidRequestError

_PANEL = "The draft"

Layers = Annotated[
    str,
    typer.Option(
        "--layers",
        help="How many of the target's layers to keep, spread evenly; or which: 0,1,14,29.",
        rich_help_panel=_PANEL,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `distill`."""
    app.command("distill")(with_clear_errors(distill))


def distill(
    model: opt.TargetModel,
    text: opt.Text,
    output: opt.Output,
    layers: Layers = "4",
    epochs: opt.Epochs = 2,
    learning_rate: opt.LearningRate = 5e-4,
    window: opt.Window = 256,
    batch: opt.Batch = 2,
    held_out: opt.HeldOut = 0.05,
    max_tokens: opt.MaxTokens = None,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
) -> None:
    """Cut a draft model out of MODEL, distil it on MODEL's distributions over a text, and write it
    to OUTPUT: an ordinary checkpoint folder, which the method draft-model takes.

    A run that was cut off goes on where it was when the same command is given again.
    """
    use_threads(threads)
    from checkpoints_tools.slice_training import plan_slice, spread_layers
    from checkpoints_tools.target_checkpoint import load_target
    from checkpoints_tools.training_run import run_training
    from checkpoints_tools.training_text import read_training_text
    from checkpoints_tools.write_tokenizer import write_tokenizer
    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.loading.model_cache import home

    wanted = _numbers(layers)
    use_compile_cache(home() / "compiled")
    target = load_target(model, say)
    if len(wanted) == 1:
        wanted = spread_layers(target.model.config.num_layers, wanted[0])
    plan = plan_slice(target, wanted)
    windows = read_training_text(text, target.model, window, held_out, max_tokens)
    output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(target, output)
    settings = opt.settings(epochs, batch, learning_rate, seed)
    run_training(plan, target, windows, settings, output, say)


def _numbers(layers: str) -> tuple[int, ...]:
    parts = layers.split(",")
    if not all(part.strip().isdecimal() and len(part) < 6 for part in parts):
        raise InvalidRequestError(
            f"--layers is {layers[:40]!r}; give a number, or several with commas between", "layers"
        )
    numbers = tuple(int(part) for part in parts)
    if numbers == (0,):
        raise InvalidRequestError("--layers is 0; keep at least one", "layers")
    return numbers
