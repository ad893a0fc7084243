"""`checkpoints_tools verify`: read all of a checkpoint as serving would; look at every number."""

from typing import Annotated, Any

import typer

from checkpoints_tools.inspect import Checkpoint
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.errors import ModelLoadError

DraftOf = Annotated[
    str | None,
    typer.Option("--draft-of", metavar="MODEL", help="CHECKPOINT is a draft for this target."),
]


def register(app: typer.Typer) -> None:
    """Add the command `verify`."""
    app.command("verify")(with_clear_errors(verify))


def verify(checkpoint: Checkpoint, draft_of: DraftOf = None) -> None:
    """Load CHECKPOINT: every tensor is there, of its shape, and holds finite numbers; its tokenizer
    fits. Exit code 1 and a sentence if not."""
    import jax

    from jaxserve.loading.drafts import load_draft
    from jaxserve.loading.load import load_model

    if draft_of is None:
        model = load_model(checkpoint, dtype="float32", progress=say)
        name, params = model.name, model.params
        if model.tokenizer.vocab_size > model.config.vocab_size:
            raise ModelLoadError(
                f"{name}: the tokenizer has {model.tokenizer.vocab_size} ids, the model "
                f"{model.config.vocab_size}; take the tokenizer of the same checkpoint"
            )
    else:
        draft = load_draft(checkpoint, _config_of(draft_of), progress=say)
        name, params = f"{draft.name} ({draft.draft.name})", draft.params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        _check_finite(jax.tree_util.keystr(path, simple=True, separator="."), leaf)
    typer.echo(f"{name}: {len(leaves)} parameters, all finite")


def _config_of(target: str) -> Any:
    from jaxserve.loading.describe import describe_model

    return describe_model(target, dtype="float32").config


def _check_finite(path: str, leaf: Any) -> None:
    import jax.numpy as jnp

    bad = int(jnp.sum(~jnp.isfinite(leaf)))
    if bad:
        raise ModelLoadError(
            f"{path}: {bad} of {leaf.size} numbers are not finite; the file is damaged, or was "
            "saved from a training that had diverged"
        )
