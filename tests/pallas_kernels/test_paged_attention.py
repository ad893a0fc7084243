"""Paged attention against a float64 formula, and the properties every backend must have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case


def make_inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Random queries, a pool with NaN in every slot that no row owns, shuffled pages."""
    rng = np.random.default_rng(seed)
    rows = case.decode + case.prefill
    R, W, S = len(rows), case.width, case.page_size
    pages_needed = [-(-kv // S) for _, kv in rows]
    P = max(max(pages_needed), 1) + 2
    N = sum(pages_needed) + 4
    free = list(rng.permutation(np.arange(1, N)))
    table = np.zeros((R, P), np.int32)
    shape = (N, S, case.num_kv_heads, case.head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for r, (_, kv) in enumerate(rows):
        for p in range(pages_needed[r]):
            table[r, p] = page = free.pop()
            used = min(S, kv - p * S)
            keys[page, :used] = rng.standard_normal((used, *shape[2:]))
            values[page, :used] = rng.standard_normal((used, *shape[2:]))
    lens = np.array([n for n, _ in rows], np.int32)
    starts = np.zeros(R, np.int32)
    starts[: len(case.decode)] = np.arange(len(case.decode)) * W
    at = len(case.decode) * W
    for r in range(len(case.decode), R):
        starts[r] = at
        at += lens[r]
    T = at + case.pad_tokens
    tree = None
    if case.tree:
        tree = np.tril(rng.random((len(case.decode), W, W)) < 0.6) | np.eye(W, dtype=bool)
    return {
        "q": rng.standard_normal((T, case.num_heads, case.head_dim)).astype(np.float32),
        "key_pages": keys,
        "value_pages": values,
        "page_table": table,
        "query_starts": starts,
        "query_lens": lens,
        "kv_lens": np.array([kv for _, kv in rows], np.int32),
        "sinks": rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None,
        "tree_mask": tree,
    }


def run(case: Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    inputs = dict(inputs)
    tree, sinks = inputs.pop("tree_mask"), inputs.pop("sinks")

    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return paged_attention(
            **arrays,
            decode_rows=len(case.decode),
            width=case.width,
            scale=case.head_dim**-0.5,
            window=case.window,
            softcap=case.softcap,
            sinks=None if sinks is None else jnp.asarray(sinks),
            tree_mask=None if tree is None else jnp.asarray(tree),
        )

    return np.asarray(jax.jit(call)(inputs))


def oracle(case: Case, x: dict[str, np.ndarray]) -> np.ndarray:
    """One query at a time, in float64, from the definition."""
    S, group = case.page_size, case.num_heads // case.num_kv_heads
    out = np.zeros(x["q"].shape, np.float64)
    for r, (n, kv) in enumerate(case.decode + case.prefill):
        at = np.arange(kv)
        keys = x["key_pages"][x["page_table"][r, at // S], at % S].astype(np.float64)
        vals = x["value_pages"][x["page_table"][r, at // S], at % S].astype(np.float64)
        for i in range(n):
            first, here = kv - n, kv - n + i
            seen = at <= here
            if case.window is not None:
                seen &= at > here - case.window
            if case.tree and r < len(case.decode):
                seen = at < first
                seen[first:] = x["tree_mask"][r, i, :n]
            t = x["query_starts"][r] + i
            for h in range(case.num_heads):
                score = keys[seen, h // group] @ x["q"][t, h].astype(np.float64)
                score *= case.head_dim**-0.5
                if case.softcap:
                    score = case.softcap * np.tanh(score / case.softcap)
                extra = [x["sinks"][h]] if case.sinks else []
                e = np.exp(np.concatenate([score, extra]) - max(score.max(), *extra, -1e9))
                out[t, h] = (e[: len(score)] / e.sum()) @ vals[seen, h // group]
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_float64_oracle_with_nan_in_free_slots(case: Case) -> None:
    inputs = make_inputs(case)
    got = run(case, inputs)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, oracle(case, inputs), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_free_slots_and_page_order_change_no_bit(case: Case) -> None:
    inputs = make_inputs(case)
    expected = run(case, inputs)
    rng = np.random.default_rng(1)
    order = np.concatenate([[0], rng.permutation(np.arange(1, len(inputs["key_pages"])))])
    where = np.argsort(order)
    moved = dict(inputs)
    for name in ("key_pages", "value_pages"):
        pages = inputs[name][order]
        moved[name] = np.where(np.isnan(pages), np.float32(7.5), pages)
    moved["page_table"] = np.where(
        inputs["page_table"] == 0, 0, where[inputs["page_table"]]
    ).astype(np.int32)
    assert np.array_equal(run(case, moved), expected)


def test_neighbours_change_no_bit_of_a_decode_row() -> None:
    case = next(c for c in CASES if c.name == "decode-ragged")
    inputs = make_inputs(case)
    expected = run(case, inputs)
    changed = {k: None if v is None else v.copy() for k, v in inputs.items()}
    pages = changed["page_table"][3]
    changed["key_pages"][pages[pages > 0]] *= 3
    changed["q"][3] += 1
    got = run(case, changed)
    assert np.array_equal(got[:3], expected[:3])
    assert not np.array_equal(got[3], expected[3])


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = CASES[0]
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"][:, :3]
    with pytest.raises(ValueError, match="multiple of KV heads"):
        run(case, inputs)
    with pytest.raises(NotImplementedError, match="backend 'magic'"):
        paged_attention(
            *(jnp.asarray(make_inputs(case)[k]) for k in (
                "q", "key_pages", "value_pages", "page_table", "query_starts", "query_lens",
                "kv_lens")),
            decode_rows=1, width=1, scale=1.0, backend="magic",
        )  # fmt: skip
