"""A plan against the engine that it plans, and its text against a golden."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.buckets import largest_bucket
from jaxserve.core.program_memory import tree_bytes
from jaxserve.engine.engine import Engine
from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.planning import plan_model as plans
from jaxserve.planning.devices import Device
from jaxserve.planning.plan_model import plan_model
from jaxserve.planning.plan_text import plain_text, plan_report
from jaxserve.planning.serving_plan import ServingPlan
from tests.support.tiny_engine import SMALL, tiny_config, tiny_model

GOLDEN = Path(__file__).parent / "plan_h100.txt"
SETTINGS = {**SMALL, "dtype": "float32", "kv_memory": 100_000, "attention_backend": "reference"}
CPU = Device("cpu", "a CPU", "a test", 16_000_000_000, 20e9, {"float32": 100e9})
LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def plan_of(
    model: str, device: str = "h100", *, context: int = 1024, estimate: bool = True, **settings: Any
) -> ServingPlan:
    heard: list[str] = []
    config = EngineConfig(**{"dtype": "bfloat16", **settings})
    return plan_model(model, device, config, context=context, estimate=estimate, say=heard.append)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "measured_cpu", lambda: CPU)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.usefixtures("measured")
def test_the_plan_is_what_the_engine_allocates(tmp_path: Path, kv_cache_dtype: str) -> None:
    """Weights, pool and state by the arrays themselves; temporaries by what XLA compiled."""
    settings = SETTINGS | {"kv_cache_dtype": kv_cache_dtype}
    model = write_config(tmp_path, tiny_config())
    plan = plan_of(model, "cpu", estimate=False, **settings)
    loaded = tiny_model()
    engine = Engine(loaded, EngineConfig(**settings))
    assert plan.memory.weights == tree_bytes(loaded.params)
    assert plan.memory.pool == tree_bytes(engine.runner.pool)
    assert plan.shape == engine.shape
    assert plan.cost is not None
    assert plan.cost.bucket.name == "mixed4+64"
    engine.warm_up()
    made = engine.runner.memory_plan(largest_bucket(engine.ready_buckets))
    assert plan.memory.temporaries == plan.cost.temporaries == made.temporaries > 0
    assert (made.weights, made.pool) == (plan.memory.weights, plan.memory.pool)
    assert made.sampling_state == plan.memory.sampling_state
    assert made.bucket == "mixed4+64"


@pytest.mark.usefixtures("measured")
def test_xla_counts_the_operations_of_the_arithmetic(tmp_path: Path) -> None:
    """Two for every weight and token; norms, attention and sampling add a little."""
    model = write_config(tmp_path, tiny_config(hidden_size=256, intermediate_size=1024))
    plan = plan_of(model, "cpu", estimate=False, **(SETTINGS | {"kv_memory": 1 << 20}))
    assert plan.cost is not None
    assert plan.cost.operations is not None
    bucket = plan.cost.bucket
    matrices = bucket.num_tokens * plan.work.layers + bucket.num_rows * plan.work.unembed
    assert matrices < plan.cost.operations < 1.1 * matrices


def test_llama_2_13b_as_it_is_published(tmp_path: Path) -> None:
    """Its 13,015,864,320 parameters, a little more than the 13.0e9 that people say."""
    report = plan_report(plan_of(write_config(tmp_path, LLAMA_2_13B)))
    assert report["weights"] == [
        {"kept_as": "bfloat16", "numbers": 13_015_864_320, "bytes": 26_031_728_640}
    ]
    assert report["kv_bytes_per_token"] == 819_200
    assert report["page_bytes"] == 64 * 819_200
    assert [(fit["context"], fit["batch"]) for fit in report["largest_batch"]] == [
        (1024, 54), (4096, 13),
    ]  # fmt: skip
    decode = {step["batch"]: step for step in report["decode"]}
    assert sorted(decode) == [1, 8, 54, 64]
    assert decode[64]["read_bytes"] == 26_031_728_640 + 64 * 1024 * 819_200
    assert not decode[64]["fits"]
    assert decode[54]["fits"]
    assert json.loads(json.dumps(report)) == report


def test_the_memory_that_may_be_used_is_filled(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_2_13B)
    plan = plan_of(model, max_batch_rows=256)
    assert plan.memory.usable == 72_000_000_000
    assert plan.memory.usable - plan.page_bytes < plan.memory.on_device <= plan.memory.usable
    half = plan_of(model, gpu_memory_utilization=0.5, max_batch_rows=256)
    assert half.memory.usable == 40_000_000_000
    given = plan_of(model, kv_memory=60_000_000_000, max_batch_rows=256)
    assert given.memory.warning is not None
    assert "h100 may use 72.00 GB" in given.memory.warning


def test_windowed_layers_let_more_sequences_in(tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = tiny_config(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=6,
        layer_types=layers,
        sliding_window=64,
        max_position_embeddings=65_536,
        head_dim=8,
        rope_local_base_freq=10_000.0,
        query_pre_attn_scalar=8,
        hidden_activation="gelu_pytorch_tanh",
    )
    plan = plan_of(write_config(tmp_path, gemma), context=4096)
    token = 2 * 2 * 8 * 2  # bytes of a layer's token: keys and values, heads, head_dim, bfloat16
    step = plan.decode[0]
    assert step.read_bytes - plan.memory.weights == (4096 + 5 * 64) * token
    assert "(window 64)" in plain_text(plan)


def test_what_cannot_fit_says_so(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_2_13B)
    with pytest.raises(InvalidRequestError, match=r"weights take 26\.03 GB.*nothing is left"):
        plan_of(model, "l4")
    with pytest.raises(ModelLoadError, match="config: hidden_size is None"):
        plan_of(write_config(tmp_path, {"architectures": ["LlamaForCausalLM"]}))


def test_an_unknown_speed_stays_unknown(tmp_path: Path) -> None:
    model = write_config(tmp_path, tiny_config())
    plan = plan_of(model, "cpu", **SETTINGS)
    report = plan_report(plan)
    assert report["decode"][0]["seconds"] is None
    assert report["prefill_tokens_per_second"] is None
    assert "the bandwidth is not known" in plain_text(plan)
    assert "--estimate: no step was compiled" in plain_text(plan)


def test_h200_without_its_compiler_says_how_to_get_it(tmp_path: Path) -> None:
    model = write_config(tmp_path, tiny_config())
    plan = plan_of(model, "h200", estimate=False)
    if plan.cost is None:  # the usual environment
        assert 'pip install "jaxserve[gpu]"' in plain_text(plan)
    else:
        assert "compiled for NVIDIA H200 SXM" in plain_text(plan)


def test_the_text_shows_the_arithmetic(tmp_path: Path) -> None:
    model = write_config(tmp_path / "llama-2-13b", LLAMA_2_13B)
    assert plain_text(plan_of(model)) + "\n" == GOLDEN.read_text()
