"""What the target makes of a text: hidden states, kept on disk so that they are computed once.

A small draft is trained over many passes; the target is run once. Its last hidden states are kept
as float16 (they are normed, and small), its layers' inputs as bfloat16 (some reach 1e5).
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
import ml_dtypes
import numpy as np

from checkpoints_tools.training_text import PADDING, Windows
from checkpoints_tools.whole_sequences import no_keys, sequence_batch, sequence_ops
from jaxserve.core.ops import Ops
from jaxserve.errors import ModelLoadError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.base import Config, ModelDef, Params

Advance = Callable[[int], None]
TAP_TYPE = np.dtype(ml_dtypes.bfloat16)
HIDDEN, TAPS = "hidden.f16", "taps.bf16"  # arrays of a folder of states
KEEP_SECONDS = 20.0  # of work that may be lost


@dataclass(frozen=True)
class TargetStates:
    """Of N windows of L tokens. hidden [N, L, E]: as forward returns them; taps [N, L, n E]: the
    wanted layers' inputs, joined. A row of zeros is padding. tap_scale [n E]: what batches have
    their taps divided by."""

    windows: Windows
    hidden: np.ndarray
    taps: np.ndarray
    tap_scale: np.ndarray | None = None

    def channel_sizes(self) -> np.ndarray:
        """Root mean square of each channel of the taps, [n E], of tokens that begin no document."""
        squares, count = np.zeros(self.taps.shape[-1]), 0
        for index in range(len(self.windows)):
            inner = self.windows.positions[index] > 0
            squares += (self.taps[index][inner].astype(np.float32) ** 2).sum(axis=0)
            count += int(inner.sum())
        return np.sqrt(squares / max(count, 1) + 1e-12).astype(np.float32)

    def batches(self, order: np.ndarray, size: int) -> Iterator["StatesBatch"]:
        """Windows in this order, `size` at a time; what does not fill a batch is left out."""
        for start in range(0, len(order) - size + 1, size):
            yield self.batch(order[start : start + size])

    def batch(self, index: np.ndarray) -> "StatesBatch":
        """These windows, as float32."""
        windows = self.windows.take(index)
        taps = self.taps[index].astype(np.float32)
        if self.tap_scale is not None:
            taps /= self.tap_scale
        return StatesBatch(
            windows.tokens,
            windows.rows,
            windows.positions,
            self.hidden[index].astype(np.float32),
            taps,
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "rows", "positions", "hidden", "taps"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StatesBatch:
    """B windows: tokens, rows, positions [B, L] int32; hidden [B, L, E] and taps [B, L, n E]."""

    tokens: Any
    rows: Any
    positions: Any
    hidden: Any
    taps: Any


def target_states(
    target: LoadedModel,
    windows: Windows,
    tap_names: tuple[str, ...],
    path: Path,
    *,
    rows: int,
    advance: Advance,
) -> TargetStates:
    """The states of these windows: what `path` holds of them, and the rest computed into it.

    rows: windows at a time. advance: is told how many more windows there are. Raises
    ModelLoadError if the target gives no such taps, or numbers that are not finite.
    """
    path.mkdir(parents=True, exist_ok=True)
    N, L = windows.tokens.shape
    run = partial(_states, target.model, target.config, _ops(target, L), tap_names)
    shapes = jax.eval_shape(run, target.params, *(np.zeros((rows, L), np.int32),) * 3)
    about = {"windows": windows.fingerprint(), "taps": list(tap_names), "target": target.name}
    done = _Done(path / "states.json", about)
    kept = done.count if (path / HIDDEN).is_file() else 0
    mode: Any = "r+" if kept else "w+"
    hidden = _map(path / HIDDEN, np.dtype(np.float16), mode, (N, L, shapes[0].shape[-1]))
    taps = _map(path / TAPS, TAP_TYPE, mode, (N, L, shapes[1].shape[-1]))
    advance(kept)
    for start in range(kept, N, rows):
        count = min(rows, N - start)
        part = windows.take(np.minimum(np.arange(start, start + rows), N - 1))
        got = jax.device_get(run(target.params, part.tokens, part.rows, part.positions))
        _check(target.name, start, *got)
        hidden[start : start + count] = got[0][:count]
        taps[start : start + count] = got[1][:count].astype(TAP_TYPE)
        done.write(start + count, final=start + count == N, arrays=(hidden, taps))
        advance(count)
    return TargetStates(windows, hidden, taps)


class _Done:
    """How many windows the files hold, in a file beside them."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = about
        self._written = time.monotonic()
        found = _read(path)
        self.count = found.get("done", 0) if found.get("about") == about else 0

    def write(self, count: int, final: bool, arrays: tuple[np.ndarray, ...]) -> None:
        """Now and then, after the arrays themselves are on disk."""
        if not final and time.monotonic() - self._written < KEEP_SECONDS:
            return
        for array in arrays:
            if isinstance(array, np.memmap):
                array.flush()
        self._path.write_text(json.dumps({"done": count, "about": self._about}))
        self._written = time.monotonic()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check(name: str, window: int, hidden: np.ndarray, taps: np.ndarray) -> None:
    if not (np.isfinite(hidden).all() and np.isfinite(taps).all()):
        raise ModelLoadError(
            f"{name}: the hidden states of window {window} are not finite; are its weights damaged?"
        )
    largest = np.abs(hidden).max(initial=0)
    if largest > np.finfo(np.float16).max:
        raise ModelLoadError(
            f"{name}: the hidden states of window {window} reach {largest:.3g}; they are kept as "
            "float16, so this target cannot be learnt from"
        )


def _ops(target: LoadedModel, length: int) -> Ops:
    return sequence_ops(target.model.kv_spec(target.config), length)


def _map(path: Path, dtype: np.dtype, mode: Any, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:  # no taps: a file cannot be mapped that has no bytes
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode, shape=shape)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _states(
    model: ModelDef,
    config: Config,
    ops: Ops,
    tap_names: tuple[str, ...],
    params: Params,
    tokens: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """hidden [B, L, E] and the taps, joined [B, L, n E]; zeros where there is padding."""
    B, L = tokens.shape
    batch = sequence_batch(tokens, rows, positions)
    hidden, taps, _ = model.forward(config, params, batch, no_keys(), ops)
    missing = [name for name in tap_names if name not in taps]
    if missing:
        raise ModelLoadError(
            f"model {model.name!r} gives no tap {missing[0]!r}; its forward has to return it, see "
            "docs/models.md"
        )
    joined = [taps[name] for name in tap_names] or [jnp.zeros((B * L, 0), hidden.dtype)]
    real = (rows != PADDING)[..., None]
    return (
        jnp.where(real, hidden.reshape(B, L, -1), 0),
        jnp.where(real, jnp.concatenate(joined, axis=1).reshape(B, L, -1), 0),
    )
