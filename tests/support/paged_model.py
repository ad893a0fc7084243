"""Runs a ModelDef over a paged pool, one step at a time, as the engine would.

Page tables, slots and padding are laid out here by hand, so that a test says what a step holds.
Layers that look back different distances have tables of their own, with ids of their own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.backends import make_ops
from jaxserve.core.kv_layout import KVLayout, kv_layout
from jaxserve.core.kv_pool import KVPool, make_pool
from jaxserve.core.ops import Ops
from jaxserve.core.step_batch import StepBatch
from jaxserve.loading.random_init import random_tensors, standard_noise
from jaxserve.models.base import Config, ModelDef, Params, ParamSpec, WeightNames
from jaxserve.models.registry import find_model

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


@dataclass
class PagedSequence:
    """A request's place in the pool: the pages it may use, in order, and the tokens so far.

    pages: of the first table group; the others have the same in parts of the pool of their own.
    tables: if given, the ids of every table group instead.
    """

    pages: Sequence[int] = ()
    length: int = 0
    tables: Sequence[Sequence[int]] | None = None


@dataclass
class PagedModel:
    """A model, its weights and a pool whose every slot starts as NaN: reading a free one shows.

    num_pages: of each table group. layout: None: that of the model. kv_dtype: of the pool; one of
    8 bits has NaN for scales.
    """

    model: ModelDef
    config: Config
    params: Params
    num_pages: int = 64
    page_size: int = 4
    pages_per_row: int = 24
    jitted: bool = False  # the whole step as one donated program, as the engine has it
    layout: KVLayout | None = None
    backend: str = "reference"
    kv_dtype: str = "float32"
    width: int = 1  # tokens a decode row owns
    ops: Ops = field(init=False)
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.kv_spec(self.config)
        layout = self.layout = self.layout or kv_layout(spec)
        ops = make_ops(self.backend, spec)
        self.ops = replace(ops, attend=replace(ops.attend, layout=layout))
        num_pages = layout.num_tables * self.num_pages
        dtype = jnp.dtype(self.kv_dtype)
        pool = make_pool(layout, num_pages, self.page_size, dtype, backend=self.backend)
        junk = 77 if dtype == jnp.int8 else jnp.nan
        self.pool = jax.tree.map(
            lambda pages: jnp.full_like(pages, junk if pages.dtype == dtype else jnp.nan), pool
        )

    def step(
        self,
        decode: Sequence[tuple[PagedSequence, int | Sequence[int]] | None] = (),
        prefill: Sequence[tuple[PagedSequence, Sequence[int]]] = (),
        *,
        pad_rows: int = 0,
        pad_tokens: int = 0,
        junk: int = 0,
    ) -> list[np.ndarray]:
        """One step. Logits [tokens, V] of every decode row, then of every prefill row.

        decode: a sequence and its next token (up to `width` of them), or None for a padded row.
        junk: the token id and position that padding carries.
        """
        batch, owned = self._batch(decode, prefill, pad_rows, pad_tokens, junk)
        run = _run_jitted if self.jitted else _run
        logits, self.pool = run(self.model, self.config, self.ops, self.params, batch, self.pool)
        return [np.asarray(logits[start : start + length]) for start, length in owned]

    def _batch(
        self,
        decode: Sequence[tuple[PagedSequence, int | Sequence[int]] | None],
        prefill: Sequence[tuple[PagedSequence, Sequence[int]]],
        pad_rows: int,
        pad_tokens: int,
        junk: int,
    ) -> tuple[StepBatch, list[tuple[int, int]]]:
        rows: list[tuple[PagedSequence, Sequence[int]] | None] = [
            None if row is None else (row[0], [row[1]] if isinstance(row[1], int) else row[1])
            for row in decode
        ]
        rows += [*prefill, *[None] * pad_rows]
        T = self.width * len(decode) + sum(len(tokens) for _, tokens in prefill) + pad_tokens
        flat = {
            "tokens": np.full(T, junk, np.int32),
            "positions": np.full(T, junk, np.int32),
            "row_of_token": np.full(T, (R := len(rows)), np.int32),
        }
        query_starts, query_lens, kv_lens = np.zeros((3, R), np.int32)
        assert self.layout is not None
        G = self.layout.num_tables
        write_slot = np.full((G, T), -1, np.int32)
        table = np.zeros((G, R, self.pages_per_row), np.int32)
        owned, start = [], 0
        for index, row in enumerate(rows):
            is_decode = index < len(decode)
            query_starts[index] = start
            if row is None:
                start += self.width * is_decode
                continue
            sequence, tokens = row
            at = slice(start, start + len(tokens))
            positions = np.arange(sequence.length, sequence.length + len(tokens), dtype=np.int32)
            own = self._own_pages(sequence)
            table[:, index, : own.shape[1]] = own
            flat["tokens"][at] = tokens
            flat["positions"][at] = positions
            flat["row_of_token"][at] = index
            page = table[:, index, positions // self.page_size]
            write_slot[:, at] = page * self.page_size + positions % self.page_size
            sequence.length += len(tokens)
            query_lens[index], kv_lens[index] = len(tokens), sequence.length
            owned.append((start, len(tokens)))
            start += self.width if is_decode else len(tokens)
        batch = StepBatch(
            **flat,
            prev_row=np.full(T, -1, np.int32),
            query_starts=query_starts,
            query_lens=query_lens,
            kv_lens=kv_lens,
            write_slot=write_slot,
            page_table=table,
            adapter_slot=np.zeros(R, np.int32),
            state_slot=np.zeros(R, np.int32),
            sample_at=np.zeros((R, 1), np.int32),
            decode_rows=len(decode),
            width=self.width,
        )
        return batch, owned

    def _own_pages(self, sequence: PagedSequence) -> np.ndarray:
        """Page ids [table groups, pages]."""
        if sequence.tables is not None:
            return np.array(sequence.tables, np.int32)
        assert self.layout is not None
        parts = np.arange(self.layout.num_tables, dtype=np.int32)[:, None] * self.num_pages
        return np.array(sequence.pages, np.int32)[None] + parts

    def whole(self, tokens: Sequence[int], pages: Sequence[int] | None = None) -> np.ndarray:
        """Logits [tokens, V] of a prompt in one step."""
        pages = range(1, 1 + self.pages_per_row) if pages is None else pages
        return self.step(prefill=[(PagedSequence(pages), tokens)])[0]


def _run(
    model: ModelDef, config: Config, ops: Ops, params: Params, batch: StepBatch, pool: KVPool
) -> tuple[jax.Array, KVPool]:
    """No jit around it: the layers' inner jits then compile once, and for many models alike."""
    hidden, _, pool = model.forward(config, params, batch, pool, ops)
    return model.unembed(config, params, hidden, ops), pool


_run_jitted = partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)(_run)


def random_params(model: ModelDef, config: Config, seed: int = 0) -> Params:
    """Params of any model: matrices of deviation 1 / sqrt(last axis), all else near its init."""

    def draw(path: Any, spec: ParamSpec) -> np.ndarray:
        noise = standard_noise(f"{seed}:{jax.tree_util.keystr(path)}", spec.shape)
        if spec.init == "normal":
            return noise * np.float32(spec.shape[-1] ** -0.5)
        return np.float32(spec.init == "ones") + np.float32(0.1) * noise

    specs = model.param_specs(config)
    return jax.tree_util.tree_map_with_path(
        draw, specs, is_leaf=lambda node: isinstance(node, ParamSpec)
    )


def params_of_tensors(model: ModelDef, config: Config, tensors: Mapping[str, np.ndarray]) -> Params:
    """Join checkpoint tensors into params; every tensor is used, every shape is the specs'."""
    left = dict(tensors)

    def join(spec: ParamSpec, source: WeightNames) -> np.ndarray:
        array = np.concatenate([left.pop(name) for name in source.names])
        assert array.shape == spec.shape, (source.names, array.shape, spec.shape)
        return array

    params = jax.tree.map(
        join,
        model.param_specs(config),
        model.weight_names(config),
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )
    assert not left, sorted(left)
    return params


def load_golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"{name}.json").read_text())


def golden_model(golden: Mapping[str, Any]) -> PagedModel:
    """The model of a golden, its weights drawn again from the seed."""
    model = find_model(golden["config"]["architectures"][0])
    config = model.config_from_hf(golden["config"])
    shapes = {name: tuple(shape) for name, shape in golden["shapes"].items()}
    tensors = random_tensors(shapes, golden["seed"], golden["norm_center"])
    return PagedModel(model, config, params_of_tensors(model, config, tensors))
