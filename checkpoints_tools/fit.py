"""The training loop: AdamW over batches of windows, held-out scores, and where it stopped.

What is needed to go on (parameters, optimiser state, step) is kept with orbax beside the result, so
that a run that was cut off goes on with the numbers it would have had.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from checkpoints_tools.target_states import StatesBatch, TargetStates
from jaxserve.errors import InvalidRequestError
from jaxserve.models.base import Params

SAVE_SECONDS = 120.0
MAX_NORM = 1.0  # of a gradient


@dataclass(frozen=True)
class Settings:
    """epochs: passes over the training windows. batch: windows a step."""

    epochs: int
    batch: int
    learning_rate: float
    seed: int = 0
    warmup: float = 0.05  # the share of the steps in which the rate grows


# Told after a step: how many are done, its loss, and held-out scores where they are new.
Report = Callable[[int, float, Mapping[str, Any] | None], None]


@dataclass(frozen=True)
class Learner:
    """loss(params, given, batch) -> scalar; score(params) -> what to report of held-out windows.
    given: arrays that stay as they are."""

    loss: Callable[[Params, Any, StatesBatch], jax.Array]
    given: Any
    score: Callable[[Params], Mapping[str, Any]]


def fit(
    learner: Learner,
    params: Params,
    states: TargetStates,
    settings: Settings,
    directory: Path,
    report: Report,
    score_every: int,
    about: Mapping[str, Any],
) -> Params:
    """Train from `params`, or go on from what `directory` holds; returns the trained params.

    about: JSON that says what is trained; a directory that holds the training of something else,
    with other settings or of another text is not gone on from.

    Raises InvalidRequestError if there is not one batch of windows, or if what the directory holds
    is of another training.
    """
    per_epoch = len(states.windows) // settings.batch
    total = per_epoch * settings.epochs
    if not total:
        raise InvalidRequestError(
            f"{len(states.windows)} windows do not fill a batch of {settings.batch}; give more "
            "text, or smaller batches"
        )
    optimizer = _optimizer(settings, total)
    params = jax.tree.map(jnp.array, params)  # copies: each step takes the memory of the last one's
    state = {"params": params, "optimizer": optimizer.init(params)}
    update = jax.jit(partial(_update, learner.loss, optimizer), donate_argnums=0)
    whole = {"settings": vars(settings), "windows": states.windows.fingerprint(), **about}
    with Kept(directory, json.loads(json.dumps(whole))) as kept:
        step, state = kept.restore(state)
        saved = time.monotonic()
        for batch in _batches(states, settings, per_epoch, step):
            state, loss = update(state, learner.given, batch)
            step += 1
            due = step % score_every == 0 or step == total
            report(step, float(loss), learner.score(state["params"]) if due else None)
            if step < total and time.monotonic() - saved > SAVE_SECONDS:
                kept.save(step, state)
                saved = time.monotonic()
        kept.save(step, state)
    trained: Params = state["params"]
    return trained


def _optimizer(settings: Settings, total: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=max(1, round(settings.warmup * total)),
        decay_steps=max(2, total),
        end_value=settings.learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01),
    )


def _update(
    loss: Callable[[Params, Any, StatesBatch], jax.Array],
    optimizer: optax.GradientTransformation,
    state: Params,
    given: Any,
    batch: StatesBatch,
) -> tuple[Params, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(state["params"], given, batch)
    changes, optimizer_state = optimizer.update(gradient, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    return {"params": params, "optimizer": optimizer_state}, value


def _batches(
    states: TargetStates, settings: Settings, per_epoch: int, done: int
) -> Iterator[StatesBatch]:
    """Each epoch in an order of its own, which follows from the seed; `done` batches are over."""
    for epoch in range(done // per_epoch, settings.epochs):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(states.windows))
        skip = max(done - epoch * per_epoch, 0) * settings.batch
        end = per_epoch * settings.batch
        yield from states.batches(order[skip:end], settings.batch)


class Kept:
    """The state of a training in a directory: the newest one only."""

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._directory = directory
        self._about = about
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._manager.close()

    def restore(self, state: Params) -> tuple[int, Params]:
        """(steps done, the state then); (0, state) if there is nothing."""
        step = self._manager.latest_step()
        if step is None:
            return 0, state
        about = self._restore(step, about=ocp.args.JsonRestore())
        if about != self._about:
            other = sorted(
                key for key in {*about, *self._about} if about.get(key) != self._about.get(key)
            )
            raise InvalidRequestError(
                f"{self._directory} holds another training (it differs in {', '.join(other)}); "
                "give another --output, or remove it"
            )
        return step, self._restore(step, state=ocp.args.StandardRestore(state))

    def _restore(self, step: int, **item: Any) -> Any:
        (name,) = item
        return self._manager.restore(step, args=ocp.args.Composite(**item))[name]

    def save(self, step: int, state: Params) -> None:
        """Keep this state instead of the one before it."""
        if self._manager.latest_step() == step:
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self._about)
        )
        self._manager.save(step, args=args)
        self._manager.wait_until_finished()
