"""`checkpoints_tools train-draft`: train Medusa or EAGLE heads for a target on a text file."""

from typing import TYPE_CHECKING, Annotated

import typer

from checkpoints_tools import options as opt
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.core.threads import use_threads
from jaxserve.errors import InvalidRequestError

if TYPE_CHECKING:  # the real imports are in the command, so that --help stays quick
    from checkpoints_tools.feature_training import FeaturePlan
    from checkpoints_tools.medusa_training import MedusaPlan
    from checkpoints_tools.target_checkpoint import Target
    from checkpoints_tools.training_text import Windows

_PANEL = "The draft"
METHODS = ("eagle3", "eagle", "medusa")

Kind = Annotated[
    str, typer.Option("--method", help=f"{', '.join(METHODS)}.", rich_help_panel=_PANEL)
]
Guesses = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Tokens that the draft learns to guess in a row; Medusa: its heads.",
        rich_help_panel=_PANEL,
    ),
]
Vocabulary = Annotated[
    int,
    typer.Option(
        min=16,
        help="eagle3: words that it can say, the text's most frequent ones. Fewer cost less.",
        rich_help_panel=_PANEL,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `train-draft`."""
    app.command("train-draft")(with_clear_errors(train_draft))


def train_draft(
    model: opt.TargetModel,
    text: opt.Text,
    output: opt.Output,
    method: Kind = "eagle3",
    guesses: Guesses = 4,
    draft_vocabulary: Vocabulary = 16384,
    epochs: opt.Epochs = 4,
    learning_rate: opt.LearningRate = 1e-3,
    window: opt.Window = 256,
    batch: opt.Batch = 2,
    held_out: opt.HeldOut = 0.05,
    max_tokens: opt.MaxTokens = None,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
) -> None:
    """Train a draft for MODEL and write it to OUTPUT, in the layout its kind is published in.

    The target is run over the text once; its hidden states are kept in OUTPUT/training (for
    SmolLM2 5 kB a token), beside the state of the training. A run that was cut off goes on where it
    was when the same command is given again. Text that the model has written itself is best: it is
    what will be drafted. Separate documents by form feeds or lines of <|endoftext|>.
    """
    if method not in METHODS:
        raise InvalidRequestError(f"--method is {method[:40]!r}; choose {', '.join(METHODS)}")
    use_threads(threads)
    from checkpoints_tools.target_checkpoint import load_target
    from checkpoints_tools.training_run import run_training
    from checkpoints_tools.training_text import read_training_text
    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.loading.model_cache import home

    use_compile_cache(home() / "compiled")
    target = load_target(model, say)
    windows = read_training_text(text, target.model, window, held_out, max_tokens)
    plan = _plan(method, target, windows.train, guesses, draft_vocabulary)
    settings = opt.settings(epochs, batch, learning_rate, seed)
    run_training(plan, target, windows, settings, output, say)


def _plan(
    method: str, target: "Target", text: "Windows", guesses: int, vocabulary: int
) -> "FeaturePlan | MedusaPlan":
    if method == "medusa":
        from checkpoints_tools.medusa_training import plan_medusa

        return plan_medusa(target, heads=guesses)
    from checkpoints_tools.feature_training import plan_features

    return plan_features(method, target, text, vocabulary=vocabulary, steps=guesses)
