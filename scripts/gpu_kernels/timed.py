"""What gpu_check times: each a function of arrays, with the least it must read and compute.

Inputs are made on the device and are larger than its cache: a layer reads what no layer before it
did. Numbers are random, because a GPU that multiplies zeros draws less power and runs faster.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.quantized_matmul import QuantizedArray, matmul, repack_shape
from scripts.gpu_kernels.llama import HEAD_DIM, HEADS, KV_HEADS, KV_TYPES

PAGE_SIZE = 64
CACHE_BYTES = 300 << 20  # five times an H200's second-level cache
_TYPES = {"int4": (32, True), "int8": (0, False), "fp8": (0, False)}  # group (0: a row), zeros


@dataclass(frozen=True)
class Timed:
    """function(*arguments) does the work `calls` times over, on inputs of its own each time.

    read_bytes, operations: the least that one of them takes.
    """

    op: str
    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int
    read_bytes: int
    operations: int


def copy(megabytes: int = 2048) -> Timed:
    """The measure for all others: how fast memory is read and written."""
    x = random((megabytes << 20) // 2, dtype=jnp.bfloat16)
    return Timed("copy", f"{megabytes} MB", lambda x: x * 2, (x,), 1, 2 * x.nbytes, 0)


def decode(batch: int, context: int, kv: str, *, cache_bytes: int = CACHE_BYTES) -> Timed:
    """Attention of Llama-3-8B's decode rows, in layers that are cache_bytes together."""
    token_bytes = 2 * KV_HEADS * (2 * HEAD_DIM if kv == "bf16" else HEAD_DIM + 4)
    layer_bytes = batch * context * token_bytes
    layers = max(1, -(-cache_bytes // layer_bytes))
    pages = -(-context // PAGE_SIZE)
    pool = random_pool(layers, batch * pages + 1, kv)
    q = random(batch, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages) + 1
    rows = {
        "page_table": table.astype(np.int32),
        "query_starts": np.arange(batch, dtype=np.int32),
        "query_lens": np.ones(batch, np.int32),
        "kv_lens": np.full(batch, context, np.int32),
    }
    run = attention(layers, decode_rows=batch)
    work = batch * context * 4 * HEADS * HEAD_DIM
    case = f"batch {batch}, {context} tokens, KV {kv}"
    return Timed("decode attention", case, run, (q, pool, rows), layers, layer_bytes, work)


def prefill(tokens: int, kv: str) -> Timed:
    """Causal attention of one prompt on itself."""
    pages = -(-tokens // PAGE_SIZE)
    pool = random_pool(1, pages + 1, kv)
    q = random(tokens, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    rows = {
        "page_table": np.arange(1, pages + 1, dtype=np.int32)[None],
        "query_starts": np.zeros(1, np.int32),
        "query_lens": np.full(1, tokens, np.int32),
        "kv_lens": np.full(1, tokens, np.int32),
    }
    run = attention(1, decode_rows=0)
    pairs = tokens * (tokens + 1) // 2
    size = pool["key_pages"].nbytes + pool["value_pages"].nbytes + 2 * q.nbytes
    case = f"{tokens} tokens, KV {kv}"
    return Timed(
        "prefill attention", case, run, (q, pool, rows), 1, size, 4 * HEADS * HEAD_DIM * pairs
    )


def attention(
    layers: int, *, decode_rows: int, tiles: Mapping[str, Any] | None = None
) -> Callable[..., jax.Array]:
    """Of (q, pool, rows): every layer attends with what the one before it gave.

    tiles: decode_tiles or prefill_tiles, instead of the table's.
    """
    chosen = dict(tiles or {})

    def run(q: jax.Array, pool: dict[str, jax.Array], rows: dict[str, Any]) -> jax.Array:
        for layer in range(layers):
            q = paged_attention_mosaic(
                q, layer=np.array([layer], np.int32), decode_rows=decode_rows, width=1,
                scale=HEAD_DIM**-0.5, **chosen, **pool, **rows,
            )  # fmt: skip
        return q

    return run


def product(
    name: str, shape: tuple[int, int], rows: int, weights: str, *, cache_bytes: int = CACHE_BYTES
) -> Timed:
    """A matrix of Llama-3-8B times so many rows of activations; enough copies to miss the cache.

    weights: a packed type, or bf16, which XLA multiplies.
    """
    N, K = shape
    one = packed_shape(weights, N, K)
    size = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(one))
    copies = max(1, -(-cache_bytes // size))
    matrices = [random_like(one) for _ in range(copies)]
    x = random(rows, K, dtype=jnp.bfloat16)

    def run(x: jax.Array, matrices: Sequence[Any]) -> list[jax.Array]:
        return [_product(x, w) for w in matrices]

    moved = size + 2 * rows * (K + N)
    case = f"{name}, {rows} rows, {weights}"
    return Timed("matmul", case, run, (x, matrices), copies, moved, 2 * rows * N * K)


def _product(x: jax.Array, w: Any) -> jax.Array:
    if isinstance(w, QuantizedArray):
        return matmul(x, w).astype(x.dtype)
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32).astype(x.dtype)


def packed_shape(weights: str, N: int, K: int) -> Any:
    """Shapes of a matrix as the GPU keeps it."""
    if weights == "bf16":
        return jax.ShapeDtypeStruct((N, K), jnp.bfloat16)
    group, zeros = _TYPES[weights]
    groups = K // (group or K)
    code = jnp.int8 if weights == "int8" else jnp.uint8
    parts = {
        "codes": jax.ShapeDtypeStruct((N, K // 2 if weights == "int4" else K), code),
        "scales": jax.ShapeDtypeStruct((N, groups), jnp.float32),
    }
    if zeros:
        parts["zeros"] = jax.ShapeDtypeStruct((N, groups), code)
    return repack_shape(QuantizedArray(parts, weights, (N, K), group or K), "gpu")


_SEEDS = itertools.count()  # no numbers are drawn twice


def random(*shape: int, dtype: Any) -> jax.Array:
    """Numbers from -2 to 2, or codes of any value that is a number, of a type."""
    key = np.array([next(_SEEDS), 1, 2, 3], np.uint32)
    return _draw(key, shape, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """XLA's own generator: little to compile, and no more memory than the result."""
    bits = jax.lax.rng_bit_generator(key, shape, jnp.uint8)[1]
    if dtype == jnp.float8_e4m3fn:
        return jax.lax.bitcast_convert_type(bits % 120, dtype)
    if dtype == jnp.uint8:  # perhaps bits of e4m3: no NaN
        return bits % 120
    signed = jax.lax.bitcast_convert_type(bits, jnp.int8)
    return signed if dtype == jnp.int8 else (signed / jnp.float32(64)).astype(dtype)


def random_like(shapes: Any) -> Any:
    """A tree of shapes, filled; float32 parts, which are scales, with small numbers."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == jnp.float32:
            return jnp.full(leaf.shape, 0.01, jnp.float32)
        return random(*leaf.shape, dtype=leaf.dtype)

    return jax.tree.map(fill, shapes)


def random_pool(layers: int, num_pages: int, kv: str) -> dict[str, jax.Array]:
    """A stacked pool of Llama-3-8B's keys and values."""
    dtype = jnp.dtype(KV_TYPES[kv])
    shape, page = (layers, num_pages, KV_HEADS), (PAGE_SIZE, HEAD_DIM)
    keys = random(*shape, *page, dtype=dtype)
    if kv == "bf16":
        return {"key_pages": keys, "value_pages": random(*shape, *page, dtype=dtype)}
    return {
        "key_pages": keys,
        "value_pages": random(*shape, *page[::-1], dtype=dtype),
        "key_scales": jnp.full((*shape, PAGE_SIZE), 0.01, jnp.float32),
        "value_scales": jnp.full((*shape, PAGE_SIZE), 0.01, jnp.float32),
    }
