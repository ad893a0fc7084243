"""Random inputs of latent attention and the float64 formula on what the cache holds."""

import ml_dtypes
import numpy as np

from pallas_kernels.latent_attention.cases import Case

_CODES = {"int8": (np.int8, 127), "fp8": (ml_dtypes.float8_e4m3fn, 448)}


def make_inputs(case: Case, seed: int = 0, layers: int = 2) -> dict[str, np.ndarray | None]:
    """Random queries and pages, NaN in every slot that no row owns, shuffled pages.

    int8 has no NaN: its free slots hold 127 with a NaN scale.
    """
    rng = np.random.default_rng(seed)
    rows = case.decode + case.prefill
    R, S, C = len(rows), case.page_size, case.value_dim + case.rope_dim
    pages_needed = [-(-kv // S) for _, kv in rows]
    P = max(max(pages_needed), 1) + 2
    N = sum(pages_needed) + 4
    free = list(rng.permutation(np.arange(1, N)))
    table = rng.integers(0, N, (R, P)).astype(np.int32)
    numbers = np.full((layers, N, S, C), np.nan, np.float32)
    for r, (_, kv) in enumerate(rows):
        for p in range(pages_needed[r]):
            table[r, p] = page = free.pop()
            used = min(S, kv - p * S)
            numbers[:, page, :used] = rng.standard_normal((layers, used, C))
    lens = np.array([n for n, _ in rows], np.int32)
    split = len(case.decode) * case.width
    starts = np.concatenate(
        [
            np.arange(len(case.decode)) * case.width,
            split + np.concatenate([[0], np.cumsum(lens[len(case.decode) :])[:-1]])
            if case.prefill
            else np.zeros(0),
        ]
    ).astype(np.int32)
    T = split + int(lens[len(case.decode) :].sum()) + case.pad_tokens
    pages, scales = _stored(case, numbers)
    return {
        "q": rng.standard_normal((T, case.num_heads, C)).astype(ml_dtypes.bfloat16),
        "latent_pages": pages,
        "layer": np.array([layers - 1], np.int32),
        "page_table": table,
        "query_starts": starts,
        "query_lens": lens,
        "kv_lens": np.array([kv for _, kv in rows], np.int32),
        "latent_scales": scales,
    }


def _stored(case: Case, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """numbers [A, N, page, C] as the cache holds them, and scales [A, N, 2, page] or None."""
    if case.kv == "bf16":
        return numbers.astype(ml_dtypes.bfloat16), None
    dtype, top = _CODES[case.kv]
    parts, scales = [], []
    for part in np.split(numbers, [case.value_dim], axis=-1):
        scale = (np.abs(part).max(-1, keepdims=True) / top).astype(np.float32)
        codes = part / scale
        codes = np.nan_to_num(np.rint(codes), nan=127) if case.kv == "int8" else codes
        parts.append(codes.astype(dtype))
        scales.append(scale[..., 0])
    return np.concatenate(parts, axis=-1), np.stack(scales, axis=2)


def softmax_scale(case: Case) -> float:
    """What DeepSeek divides by: the root of an unabsorbed head's 128 + rope numbers."""
    return (128 + case.rope_dim) ** -0.5


def oracle(case: Case, x: dict[str, np.ndarray | None]) -> np.ndarray:
    """One query at a time, in float64, from the definition and the dequantised cache."""
    S, V = case.page_size, case.value_dim
    layer = int(x["layer"][0])
    pages = x["latent_pages"][layer].astype(np.float64)
    if x["latent_scales"] is not None:
        by = x["latent_scales"][layer].astype(np.float64)
        pages = np.concatenate(
            [pages[..., :V] * by[:, 0, :, None], pages[..., V:] * by[:, 1, :, None]], axis=-1
        )
    q = x["q"].astype(np.float64)
    out = np.zeros((*q.shape[:2], V))
    for r, (n, kv) in enumerate(case.decode + case.prefill):
        at = np.arange(kv)
        tokens = pages[x["page_table"][r, at // S], at % S]
        for i in range(n):
            seen = tokens[: kv - n + i + 1]
            score = q[x["query_starts"][r] + i] @ seen.T * softmax_scale(case)
            e = np.exp(score - score.max(-1, keepdims=True))
            out[x["query_starts"][r] + i] = (e / e.sum(-1, keepdims=True)) @ seen[:, :V]
    return out
