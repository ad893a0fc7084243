"""The training loop: it learns, and what is cut off goes on as if it had not been."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools import fit as fit_module
from checkpoints_tools.fit import Learner, Settings, fit
from checkpoints_tools.held_out import summary, tokens_per_round
from checkpoints_tools.target_states import TargetStates
from checkpoints_tools.training_text import pack
from jaxserve.errors import InvalidRequestError

SETTINGS = Settings(epochs=4, batch=2, learning_rate=0.5)


def states() -> TargetStates:
    """Eleven windows: an epoch is five batches, and one window is left out."""
    rng = np.random.default_rng(0)
    windows = pack([rng.integers(0, 9, 8).tolist() for _ in range(11)], 8)
    hidden = rng.standard_normal((11, 8, 3)).astype(np.float16)
    return TargetStates(windows, hidden, np.zeros((11, 8, 0)))


def loss(params: Any, given: jax.Array, batch: Any) -> jax.Array:
    """Linear regression of a fixed map."""
    return jnp.mean((batch.hidden @ params["w"] - batch.hidden @ given) ** 2)


WANTED = np.arange(6, dtype=np.float32).reshape(3, 2)


def run(
    directory: Path, stop_at: int | None = None, method: str = "x", **changes: Any
) -> tuple[Any, list[float]]:
    """(params or None if it was cut off after that step, losses)."""
    losses: list[float] = []

    def report(step: int, value: float, scores: Any) -> None:
        losses.append(value)
        assert (scores is not None) == (step % 10 == 0 or step == 20)
        if step == stop_at:
            raise KeyboardInterrupt

    learner = Learner(loss, jnp.asarray(WANTED), lambda params: {"w": float(params["w"][0, 0])})
    settings = Settings(**{**vars(SETTINGS), **changes})
    about = {"method": method, "layers": (1, 2)}
    start = {"w": np.zeros((3, 2), np.float32)}
    try:
        return fit(learner, start, states(), settings, directory, report, 10, about), losses
    except KeyboardInterrupt:
        return None, losses


def test_it_learns_and_takes_nobodys_arrays(tmp_path: Path) -> None:
    params, losses = run(tmp_path)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 4
    assert params["w"].shape == (3, 2)


def test_what_was_cut_off_goes_on_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is written at every step here, so the step after the last one written is next."""
    monkeypatch.setattr(fit_module, "SAVE_SECONDS", -1.0)
    want, all_losses = run(tmp_path / "straight")
    nothing, first = run(tmp_path / "cut", stop_at=8)
    assert nothing is None
    got, rest = run(tmp_path / "cut")
    assert first + rest[1:] == all_losses  # step 8 was reported, but not yet written
    np.testing.assert_array_equal(got["w"], want["w"])
    again, none = run(tmp_path / "cut")
    assert none == []
    np.testing.assert_array_equal(again["w"], want["w"])


def test_another_training_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"holds another .* in settings\); give another"):
        run(tmp_path, learning_rate=0.01)
    with pytest.raises(
        InvalidRequestError, match=r"holds another training \(it differs in method\)"
    ):
        run(tmp_path, method="y")


def test_too_few_windows(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="11 windows do not fill a batch of 12"):
        run(tmp_path, batch=12)


def test_tokens_of_a_round() -> None:
    """At 0.8 each, four drafts give (1 - 0.8 ** 5) / (1 - 0.8) = 3.36 tokens."""
    assert tokens_per_round([0.8] * 4) == pytest.approx(3.3616)
    assert tokens_per_round([]) == 1
    sums = {"greedy": np.array([4.0, 1]), "sampled": np.array([2.0, 2]), "count": np.array([8, 4])}
    found = summary(sums)
    assert found["greedy"] == {"acceptance": [0.5, 0.25], "tokens_per_round": 1.625}
    assert found["sampled"] == {"acceptance": [0.25, 0.5], "tokens_per_round": 1.375}
