"""Attention inputs as the GPU's pool holds them, and the oracle's view of the same numbers."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.paged_attention.cases import PoolCase
from tests.support.attention_inputs import make_inputs, oracle

LAYERS, LAYER = 2, 1  # only the second layer holds numbers; NaN in the first is noticed
_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclasses.dataclass
class GpuInputs:
    """Arguments of the Mosaic kernels, and what they should return in float64."""

    q: jax.Array
    pool: dict[str, jax.Array]  # key_pages, value_pages and, when scaled, key_scales, value_scales
    rows: dict[str, np.ndarray]  # page_table, query_starts, query_lens, kv_lens
    sinks: jax.Array | None
    tree_mask: jax.Array | None
    expected: np.ndarray


def gpu_inputs(case: PoolCase, seed: int = 0) -> GpuInputs:
    """Random inputs of a case; slots that no row owns hold NaN (int8: 127, with a NaN scale)."""
    x = make_inputs(case, seed)
    q = x["q"].astype(ml_dtypes.bfloat16)
    pool: dict[str, jax.Array] = {}
    seen = dict(x, q=q.astype(np.float64))
    for name in ("key", "value"):
        pages = x[f"{name}_pages"].swapaxes(1, 2)  # [N, K, page, D]
        stored, scales = _stored(pages, case.cache)
        meaning = stored.astype(np.float64)
        if scales is not None:
            meaning = meaning * scales[..., None]
            pool[f"{name}_scales"] = jnp.asarray(_stacked(scales))
        seen[f"{name}_pages"] = meaning.swapaxes(1, 2)
        if scales is not None and name == "value":
            stored = stored.swapaxes(2, 3)
        pool[f"{name}_pages"] = jnp.asarray(_stacked(stored))
    return GpuInputs(
        q=jnp.asarray(q),
        pool=pool,
        rows={n: x[n] for n in ("page_table", "query_starts", "query_lens", "kv_lens")},
        sinks=None if x["sinks"] is None else jnp.asarray(x["sinks"]),
        tree_mask=None if x["tree_mask"] is None else jnp.asarray(x["tree_mask"]),
        expected=oracle(case, seen),
    )


def _stored(pages: np.ndarray, cache: str) -> tuple[np.ndarray, np.ndarray | None]:
    if cache == "bf16":
        return pages.astype(ml_dtypes.bfloat16), None
    scales = (np.abs(pages).max(-1) / np.float32(_LARGEST[cache])).astype(np.float32)
    codes = pages / scales[..., None]
    if cache == "fp8":
        return codes.astype(ml_dtypes.float8_e4m3fn), scales
    return np.where(np.isnan(codes), 127, np.rint(codes)).astype(np.int8), scales


def _stacked(pages: np.ndarray) -> np.ndarray:
    """[A, ...] with `pages` as layer LAYER and what a free page holds in the others."""
    is_int = np.issubdtype(pages.dtype, np.integer)
    out = np.full((LAYERS, *pages.shape), 127 if is_int else np.nan, pages.dtype)
    out[LAYER] = pages
    return out


def permuted_pages(x: GpuInputs, seed: int = 1) -> GpuInputs:
    """The same rows on other pages."""
    count = x.pool["key_pages"].shape[1]
    to = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(count - 1)])
    back = np.argsort(to)
    pool = {name: pages[:, back] for name, pages in x.pool.items()}
    table = to[x.rows["page_table"]].astype(np.int32)
    return dataclasses.replace(x, pool=pool, rows=dict(x.rows, page_table=table))


def other_garbage(x: GpuInputs, number: float) -> GpuInputs:
    """The same rows; what was NaN is `number`, and codes that no row owns are something else."""
    pool = {}
    unowned = np.isnan(np.asarray(x.pool.get("key_scales", 0.0)))
    for name, pages in x.pool.items():
        if pages.dtype == jnp.int8:
            where = unowned[..., None] if name == "key_pages" else unowned[:, :, :, None]
            pool[name] = jnp.where(where, jnp.int8(-5), pages)
        else:
            held = np.asarray(pages.astype(jnp.float32))
            pool[name] = jnp.asarray(np.where(np.isnan(held), number, held)).astype(pages.dtype)
    return dataclasses.replace(x, pool=pool)


def live_pages(kv_lens: Sequence[int], page: int, window: int | None = None) -> int:
    """Pages that one query at the end of each row sees."""
    first = [0 if window is None else max(0, n - window) // page for n in kv_lens]
    return sum(-(-n // page) - at for n, at in zip(kv_lens, first, strict=True))
