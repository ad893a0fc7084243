"""`checkpoints_tools inspect`: what a checkpoint holds, from its headers."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.terminal import with_clear_errors
from jaxserve.errors import ModelLoadError

if TYPE_CHECKING:
    from jaxserve.loading.tensor_source import TensorSource

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A pulled model's name, a .gguf file or a folder."),
]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


def register(app: typer.Typer) -> None:
    """Add the command `inspect`."""
    app.command("inspect")(with_clear_errors(inspect))


def inspect(checkpoint: Checkpoint, tensors: Tensors = False) -> None:
    """Print architecture, sizes, formats and tensors of CHECKPOINT, also of a draft's folder. Only
    headers are read."""
    from checkpoints_tools.open_checkpoint import open_checkpoint

    path, config, source = open_checkpoint(checkpoint)
    formats = {name: format_of(source, name) for name in source.names()}
    shapes = {name: source.shape(name) for name in formats}
    for line in _summary(path, config, formats, shapes):
        typer.echo(line)
    if tensors:
        for name in sorted(formats):
            typer.echo(f"{name}  {list(shapes[name])}  {formats[name]}")


def format_of(source: "TensorSource", name: str) -> str:
    """How a matrix is kept; "vector" for what is none."""
    if len(source.shape(name)) != 2:
        return "vector"
    try:
        return source.packed_shape(name).format_name
    except ModelLoadError:  # numbers that are no weights
        return "other"


def _summary(
    path: Path, config: Any, formats: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    numbers: Counter[str] = Counter()
    for name, shape in shapes.items():
        size = 1
        for length in shape:
            size *= length
        numbers[formats[name]] += size
    names = config.get("architectures")
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    sizes = [f"{key} {config[key]}" for key in keys if key in config]
    parts = [f"{count / 1e6:.2f} M {kind}" for kind, count in numbers.most_common()]
    return [
        f"checkpoint    {path}",
        f"architecture  {names[0] if names else config.get('model_type', 'not named')}",
        f"sizes         {', '.join(sizes) or 'not named'}",
        f"numbers       {sum(numbers.values()) / 1e6:.2f} M: {', '.join(parts)}",
        f"tensors       {len(shapes)}",
    ]
