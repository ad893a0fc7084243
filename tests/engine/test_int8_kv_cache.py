"""Keys and values kept in 8 bits: a quarter of the memory, close to float32, exact in bits."""

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.kv_layout import kv_layout
from jaxserve.core.kv_pool import pool_shapes
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.errors import InvalidRequestError
from tests.engine.test_native_bits import packed_model, requests
from tests.support.matrix import said
from tests.support.tiny_engine import AMPLE, TIGHT, drive, tiny_engine


def test_bytes_per_token_are_those_of_the_pool() -> None:
    spec = KVSpec((KVGroup("global", (0, 1, 2), 3, 64),))
    pool = pool_shapes(kv_layout(spec), 5, 16, np.dtype(np.int8))
    arrays = (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales)
    total = sum(x.size * x.dtype.itemsize for x in arrays)
    assert total == 5 * 16 * spec.bytes_per_token(1)
    assert spec.bytes_per_token(4) / spec.bytes_per_token(1) > 3.7


@pytest.mark.parametrize(
    ("backend", "kept", "bound"),
    [
        ("reference", "int8", 0.05),
        ("cpu", "int8", 0.05),
        ("reference", "fp8", 0.3),  # three bits of mantissa, where int8 has seven at best
        ("cpu", "bf16", 0.05),
    ],
)
def test_an_engine_with_small_keys_and_values_is_close(
    backend: str, kept: str, bound: float
) -> None:
    model = packed_model("llama-f32")
    options = {"num_pages": AMPLE, "attention_backend": backend}
    plain = drive(tiny_engine(model, **options), requests("greedy", 1))
    engine = tiny_engine(model, **options, kv_cache_dtype=kept)
    small = drive(engine, requests("greedy", 1))
    names = {"int8": "int8", "fp8": "float8_e4m3fn", "bf16": "bfloat16"}
    assert engine.runner.pool.keys[0].dtype.name == names[kept]
    assert small.errors == {}
    for name, events in said(plain).items():
        assert abs(said(small)[name][0][0] - events[0][0]) < bound
    assert said(small) != said(plain)


def test_the_bits_of_a_row_are_its_own_in_int8_too() -> None:
    model = packed_model("llama-f32")
    options = {"attention_backend": "cpu", "kv_cache_dtype": "int8"}
    alone = drive(
        tiny_engine(model, num_pages=AMPLE, **options), requests("greedy", 1), together=False
    )
    chunked = tiny_engine(model, num_pages=AMPLE, pages=TIGHT, max_chunk=7, **options)
    assert said(drive(chunked, requests("greedy", 1))) == said(alone)


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'fp4'; choose auto, bf16, int8 or fp8"):
        EngineConfig(kv_cache_dtype="fp4")
