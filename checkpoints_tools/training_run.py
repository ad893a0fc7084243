"""A training from its plan to the written checkpoint, the same for every kind of draft."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints_tools.fit import Learner, Settings, fit
from checkpoints_tools.progress import acceptance_text, training_progress
from checkpoints_tools.published_layout import write_checkpoint, write_json
from checkpoints_tools.target_checkpoint import Target
from checkpoints_tools.target_states import TargetStates, target_states
from checkpoints_tools.training_text import TrainingText, Windows
from jaxserve.bench.progress import progress_bar
from jaxserve.models.base import Params

SCORES_OF_A_RUN = 10  # held-out scores are made so often
TRAINING = "training"  # the folder, in the result's, of what is needed to go on


class Plan(Protocol):
    """A draft that is to be trained: what FeaturePlan, MedusaPlan and SlicePlan have in common.

    tap_names: the target's taps that it learns from. identity: JSON that tells it from other plans
    whose training could lie in the same folder. first(seed): the params to start from.
    learner(held_out states, windows at a time). tensors(params, tap_scale): what the
    checkpoint holds; the taps that it was trained on were divided by tap_scale.
    """

    @property
    def json_config(self) -> Mapping[str, Any]: ...

    @property
    def tap_names(self) -> tuple[str, ...]: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def about(self, text: Windows) -> str: ...

    def first(self, seed: int) -> Params: ...

    def learner(self, held_out: TargetStates, batch: int) -> Learner: ...

    def tensors(self, params: Params, tap_scale: np.ndarray) -> dict[str, np.ndarray]: ...


def run_training(
    plan: Plan,
    target: Target,
    text: TrainingText,
    settings: Settings,
    output: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train and write model.safetensors, config.json and training.json to `output`.

    Goes on from what `output` holds of the same training. Returns the held-out scores.
    """
    say(
        f"text: {text.train.num_tokens} tokens in {len(text.train)} windows, "
        f"{text.held_out.num_tokens} tokens held out"
    )
    say(plan.about(text.held_out))
    output.mkdir(parents=True, exist_ok=True)
    states = _states(plan, target, text, output / TRAINING, settings.batch)
    # Some channels are a hundred times larger than others, which gradients do not go well with.
    tap_scale = states[0].channel_sizes()
    states = [replace(each, tap_scale=tap_scale) for each in states]
    learner = plan.learner(states[1], settings.batch)
    per_epoch = len(text.train) // settings.batch
    total = per_epoch * settings.epochs
    with training_progress("training", total) as report:
        params = fit(
            learner,
            plan.first(settings.seed),
            states[0],
            settings,
            output / TRAINING / "state",
            report,
            max(1, total // SCORES_OF_A_RUN),
            plan.identity,
        )
    scores = dict(learner.score(params))
    write_checkpoint(output, plan.tensors(params, tap_scale), plan.json_config)
    write_json(
        output / "training.json",
        {"target": target.name, "held_out": scores, "settings": vars(settings)},
    )
    say(f"held out: {acceptance_text(scores)}")
    say(f"written to {output}; {output / TRAINING} can go once you are done")
    return scores


def _states(
    plan: Plan, target: Target, text: TrainingText, folder: Path, rows: int
) -> list[TargetStates]:
    """Of the text that is learnt from, and of what is held out."""
    found = []
    with progress_bar("windows through the target", len(text.train) + len(text.held_out)) as more:
        for part, windows in (("train", text.train), ("held_out", text.held_out)):
            states = target_states(
                target.model, windows, plan.tap_names, folder / part, rows=rows, advance=more
            )
            found.append(states)
    return found
