"""Random inputs of paged attention, the float64 formula, and int8 pages of the same numbers."""

import numpy as np

from pallas_kernels.paged_attention.cases import Case


def make_inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray | None]:
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
    tree = None
    if case.tree:
        tree = np.tril(rng.random((len(case.decode), W, W)) < 0.6) | np.eye(W, dtype=bool)
    return {
        "q": rng.standard_normal((at + case.pad_tokens, case.num_heads, case.head_dim)).astype(
            np.float32
        ),
        "key_pages": keys,
        "value_pages": values,
        "page_table": table,
        "query_starts": starts,
        "query_lens": lens,
        "kv_lens": np.array([kv for _, kv in rows], np.int32),
        "sinks": rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None,
        "tree_mask": tree,
    }


def oracle(case: Case, x: dict[str, np.ndarray | None]) -> np.ndarray:
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


def quantized(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes [N, page_size, K, D] and scales [N, page_size, K]: absmax / 127. NaN stays NaN."""
    scales = (np.abs(pages).max(-1) / np.float32(127)).astype(np.float32)
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    codes = np.rint(np.nan_to_num(pages / safe)).astype(np.int8)
    return codes, scales


def dequantized(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes.astype(np.float64) * scales[..., None]
