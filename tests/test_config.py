"""EngineConfig refuses what cannot be meant, naming field, value and choices."""

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.speculative_config import SpeculativeConfig


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
        ("speculative_audit", 1.5, r"give a share from 0 \(off\) to 1"),
        ("speculative_audit", -0.1, "give a share"),
        ("speculative_audit", float("nan"), "give a share"),
        ("speculative_audit", True, "give a share"),
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


def test_an_audit_needs_speculation() -> None:
    ngram = SpeculativeConfig("ngram")
    assert EngineConfig(speculative=ngram, speculative_audit=0.01).speculative_audit == 0.01
    with pytest.raises(InvalidRequestError, match="give speculative_config too") as caught:
        EngineConfig(speculative_audit=0.01)
    assert caught.value.param == "speculative_audit"
