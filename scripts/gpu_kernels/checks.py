"""Is every GPU kernel right? Against float64 on the numbers it was given, before anything is timed.

The cases are those of the tests. On a GPU all of them run; interpreted on a CPU a few small ones,
which shows that the script works, and that what it would run on a GPU is right.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.kv_write.mosaic_gpu import write_kv_mosaic
from pallas_kernels.latent_attention.cases import CASES as LATENT_CASES
from pallas_kernels.latent_attention.mosaic_gpu import latent_attention_mosaic
from pallas_kernels.paged_attention.cases import (
    GPU_DECODE_CASES,
    GPU_PREFILL_CASES,
    PoolCase,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.quantized_matmul import QuantizedArray, matmul, repack
from pallas_kernels.quantized_matmul.cases import GPU_CASES, Case
from tests.support import latent_inputs
from tests.support.gpu_pool import LAYER, gpu_inputs
from tests.support.packed_arrays import expansion, random_array

ATTENTION_BOUND = 2.2e-2  # greatest error by the root mean square of the right answer
PRODUCT_BOUND = 1e-2
_ROWS = (1, 8, 17, 64, 130, 300)
# Cases that take seconds when they are interpreted.
_SMALL = {"d64-g1", "d80-g7", "plain-g4", "bits-int8", "rank256"}


@dataclass(frozen=True)
class Check:
    """One case. error: greatest, by the root mean square of the right answer; NaN where there is
    none, for the reason `why`."""

    op: str
    case: str
    error: float
    bound: float
    why: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound  # not where it is NaN


def all_checks(*, interpret: bool) -> Iterator[Check]:
    """Every case on a GPU; interpreted, some small ones."""
    for case in (*GPU_DECODE_CASES, *GPU_PREFILL_CASES):
        if not interpret or case.name in _SMALL:
            op = "decode attention" if case.decode else "prefill attention"
            yield _tried(op, case.name, ATTENTION_BOUND, lambda c=case: _attention(c, interpret))
    for case in LATENT_CASES:
        if not interpret or case.name in _SMALL:
            yield _tried(
                "latent attention", case.name, ATTENTION_BOUND, lambda c=case: _latent(c, interpret)
            )
    for name in ("bfloat16", "int8", "float8_e4m3fn"):
        if not interpret or name == "int8":
            yield _tried("kv write", name, 0.0, lambda n=name: _kv_write(n, interpret))
    products = [(Case("int4", 70, 384, 128, zeros=True), "gpu")] if interpret else GPU_CASES
    for product, layout in products:
        for rows in _ROWS[1:2] if interpret else _ROWS:
            yield _tried(
                "quantised matmul", f"{product.name} {layout} {rows} rows",
                PRODUCT_BOUND, lambda c=product, n=layout, m=rows: _product(c, n, m, interpret),
            )  # fmt: skip


def _tried(op: str, case: str, bound: float, error: Callable[[], float]) -> Check:
    try:
        return Check(op, case, error(), bound)
    except Exception as problem:  # of the compilers or the driver: the other cases still run
        return Check(op, case, math.nan, bound, f"{type(problem).__name__}: {problem}"[:300])


def _greatest(got: Any, want: np.ndarray) -> float:
    error = np.abs(np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64) - want)
    return float(error.max() / np.sqrt((want**2).mean()))


def _attention(case: PoolCase, interpret: bool) -> float:
    x = gpu_inputs(case)

    @jax.jit
    def run(q: jax.Array, pool: dict, rows: dict, sinks: Any, tree_mask: Any) -> jax.Array:
        return paged_attention_mosaic(
            q, layer=jnp.array([LAYER], jnp.int32), decode_rows=len(case.decode), width=case.width,
            scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap, sinks=sinks,
            tree_mask=tree_mask, splits=case.splits if case.decode else None,
            interpret=interpret, **pool, **rows,
        )  # fmt: skip

    return _greatest(run(x.q, x.pool, x.rows, x.sinks, x.tree_mask), x.expected)


def _latent(case: Any, interpret: bool) -> float:
    x = latent_inputs.make_inputs(case)
    arrays = {name: None if part is None else jnp.asarray(part) for name, part in x.items()}
    out = latent_attention_mosaic(
        **arrays, decode_rows=len(case.decode), width=case.width, splits=case.splits,
        scale=latent_inputs.softmax_scale(case), value_dim=case.value_dim, interpret=interpret,
    )  # fmt: skip
    return _greatest(out, latent_inputs.oracle(case, x))


def _kv_write(name: str, interpret: bool) -> float:
    """Keys and values that were written, read back; how far the numbers are from what they are in
    that type's steps, beyond half a step: 0 if every one is rounded right."""
    dtype, T, K, D, page = jnp.dtype(name), 5, 2, 64, 16
    narrow = dtype.itemsize == 1
    k, v = np.random.default_rng(0).standard_normal((2, T, K, D)).astype(np.float32)
    slots = np.array([17, 3, -1, 40, 16], np.int32)
    keys = jnp.zeros((1, 3, K, page, D), dtype)
    values = jnp.zeros((1, 3, K, D, page) if narrow else keys.shape, dtype)
    scales = [jnp.zeros((1, 3, K, page), jnp.float32) if narrow else None for _ in range(2)]
    new = [jnp.asarray(x, jnp.bfloat16) for x in (k, v)]
    pages = write_kv_mosaic(
        keys, values, *new, jnp.asarray(slots), jnp.array([0], jnp.int32),
        key_scales=scales[0], value_scales=scales[1], interpret=interpret,
    )  # fmt: skip
    keys, values, *scales = [None if x is None else np.asarray(x)[0] for x in pages]
    values = values.swapaxes(2, 3) if narrow else values
    beyond = 0.0
    for stored, scale, given in zip((keys, values), scales, new, strict=True):
        wide = np.asarray(given.astype(jnp.float32), np.float64)
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            got = stored[slot // page, :, slot % page].astype(np.float64)
            step = 0.0
            if scale is not None:
                got = got * scale[slot // page, :, slot % page, None]
                step = np.abs(wide[token]).max(-1, keepdims=True) / (127 if name == "int8" else 14)
            beyond = max(beyond, float((np.abs(got - wide[token]) - 0.501 * step).max()))
    written = np.isin(np.arange(3 * page), slots).reshape(3, page)
    touched = [(x.astype(np.float32) != 0).any((1, 3)) for x in (keys, values)]
    return max(beyond, float(((touched[0] | touched[1]) & ~written).any()))


def _product(case: Case, layout: str, rows: int, interpret: bool) -> float:
    w, wide = _matrix(case)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(rows, case.K)), jnp.bfloat16)
    y = jax.jit(lambda x, w: matmul(x, w, interpret=interpret))(x, repack(w, layout))
    exact = np.asarray(x.astype(jnp.float32))
    if layout == "gpu_w8a8":
        exact = _in_8_bits(exact, case.format_name)
    return _greatest(y, exact.astype(np.float64) @ wide.T)


@lru_cache(maxsize=1)
def _matrix(case: Case) -> tuple[QuantizedArray, np.ndarray]:
    w = random_array(case)
    return w, expansion(w).astype(np.float64)


def _in_8_bits(x: np.ndarray, format_name: str) -> np.ndarray:
    """Rows as products with 8-bit activations have them, each with a scale of its own."""
    limit = np.float32(127 if format_name == "int8" else 448)
    scale = np.abs(x).max(axis=1, keepdims=True) / limit
    if format_name == "int8":
        return np.rint(x / scale) * scale
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
