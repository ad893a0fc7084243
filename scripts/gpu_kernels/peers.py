"""The same attention by others, on keys and values in one piece: torch, cuDNN, jax's own kernels.

Each returns seconds a call and may raise: what is not installed, or refuses a shape, is reported by
its message. Torch runs in this process, after XLA, which leaves it the rest of the memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu_kernels.llama import HEAD_DIM, HEADS, KV_HEADS
from scripts.gpu_kernels.timed import PAGE_SIZE, random
from scripts.gpu_kernels.timing import seconds_a_call

_REPEATS = 20


def decode_peers(batch: int, context: int) -> Mapping[str, Callable[[], float]]:
    """Of `timed.decode` with a bfloat16 cache, by name; one layer, larger than the cache."""
    return {
        "torch SDPA": lambda: torch_sdpa(batch, 1, context, causal=False),
        "torch flex_attention": lambda: torch_flex(batch, 1, context, causal=False),
        "cuDNN by jax.nn": lambda: cudnn(batch, 1, context, causal=False),
        "jax pallas paged_attention": lambda: jax_paged(batch, context),
    }


def prefill_peers(tokens: int) -> Mapping[str, Callable[[], float]]:
    """Of `timed.prefill` with a bfloat16 cache, by name."""
    return {
        "torch SDPA": lambda: torch_sdpa(1, tokens, tokens, causal=True),
        "torch flex_attention": lambda: torch_flex(1, tokens, tokens, causal=True),
        "cuDNN by jax.nn": lambda: cudnn(1, tokens, tokens, causal=True),
        "jax pallas attention_mgpu": lambda: jax_mosaic(tokens),
    }


def cudnn(batch: int, queries: int, keys: int, *, causal: bool) -> float:
    q = random(batch, queries, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    k, v = (random(batch, keys, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16) for _ in range(2))

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    return seconds_a_call(run, (q, k, v))


def jax_paged(batch: int, context: int) -> float:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages = -(-context // PAGE_SIZE)
    q = random(batch, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    shape = (KV_HEADS, batch * pages, PAGE_SIZE, HEAD_DIM)
    k, v = (random(*shape, dtype=jnp.bfloat16) for _ in range(2))
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    lengths = np.full(batch, context, np.int32)
    return seconds_a_call(paged_attention, (q, k, v, table.astype(np.int32), lengths))


def jax_mosaic(tokens: int) -> float:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=True
    )
    q = random(1, tokens, HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    k, v = (random(1, tokens, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16) for _ in range(2))
    return seconds_a_call(lambda q, k, v: attention_mgpu.attention(q, k, v, config), (q, k, v))


def torch_sdpa(batch: int, queries: int, keys: int, *, causal: bool) -> float:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = _torch_inputs(batch, queries, keys)
    return _torch_seconds(
        torch, lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    )


def torch_flex(batch: int, queries: int, keys: int, *, causal: bool) -> float:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _torch_inputs(batch, queries, keys)
    mask = None
    if causal:
        mask = create_block_mask(
            lambda _b, _h, query, key: query >= key, None, None, queries, keys, device="cuda"
        )
    compiled = torch.compile(flex_attention)
    return _torch_seconds(torch, lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))


def _torch_inputs(batch: int, queries: int, keys: int) -> list[Any]:
    import torch

    def made(heads: int, length: int) -> Any:
        shape = (batch, heads, length, HEAD_DIM)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    return [made(HEADS, queries), made(KV_HEADS, keys), made(KV_HEADS, keys)]


def _torch_seconds(torch: Any, run: Callable[[], Any]) -> float:
    """By CUDA events, after two calls that compile and warm up."""
    with torch.no_grad():
        for _ in range(2):
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            run()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _REPEATS
