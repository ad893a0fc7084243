"""EngineConfig refuses what cannot be meant, naming field, value and choices."""

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("scheduling", "lifo", "choose fcfs, priority or prefix"),
        ("batching", "dynamic", "choose continuous or static"),
        ("dtype", "float64", "choose auto, float32 or bfloat16"),
        ("kv_cache_dtype", "fp4", "choose auto, bf16, int8 or fp8"),
        ("prefix_cache", 1, "give True or False"),
        ("kv_host_memory", -1, "whole number 0 to"),
        ("kv_host_memory", True, "whole number 0 to"),
        ("max_batch_rows", 0, "whole number 1 to"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} is {value!r}; .*{words}") as caught:
        EngineConfig(**{field: value})
    assert caught.value.param == field


def test_host_memory_needs_the_prefix_cache() -> None:
    assert EngineConfig(kv_host_memory=1 << 30).prefix_cache
    with pytest.raises(InvalidRequestError, match="leave the cache on"):
        EngineConfig(kv_host_memory=1 << 30, prefix_cache=False)
