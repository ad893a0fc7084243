"""/metrics: vLLM's names under jaxserve:, fed by steps and by requests."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.outputs import OutputDelta, StepStats
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.metrics import ChoiceTimer, ServerMetrics
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import read_metric, serve

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "late_compiles_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "kv_cache_waste_tokens",
    "kv_cache_cached_pages",
    "kv_offload_stored_pages_total",
    "kv_offload_loaded_pages_total",
    "device_idle_seconds_total",
    "admission_rejections_total",
    "iteration_tokens_total_count",
    "step_host_seconds_sum",
    "step_device_seconds_sum",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "request_params_n_sum",
    "request_params_max_tokens_sum",
]


def step(**changed: object) -> StepStats:
    fields = {
        "num_running": 3,
        "num_waiting": 2,
        "pages_used": 5,
        "pages_total": 20,
        "prompt_tokens": 7,
        "output_tokens": 3,
        "step_tokens": 10,
        "num_preemptions": 1,
        "host_seconds": 0.002,
        "device_seconds": 0.03,
        "bucket": "b",
        "late_compiles": 0,
    }
    return StepStats(**(fields | changed))  # type: ignore[arg-type]


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return read_metric(metrics.render().decode(), name, **labels)


def test_every_name_is_there_before_the_first_request() -> None:
    metrics = ServerMetrics("tiny")
    text = metrics.render().decode()
    for name in NAMES:
        assert read_metric(text, name, model_name="tiny") == 0
    assert len(list(text_string_to_metric_families(text))) >= len(NAMES)


def test_steps_add_up() -> None:
    metrics = ServerMetrics("tiny")
    metrics.on_step(step(queue_seconds=(0.5, 0.25), prefill_seconds=(1.5,)))
    metrics.on_step(step(num_running=1, num_waiting=0, pages_used=1, num_preemptions=0))
    assert value(metrics, "num_requests_running") == 1
    assert value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0.05
    assert value(metrics, "prompt_tokens_total") == 14
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "iteration_tokens_total_sum") == 20
    assert value(metrics, "step_host_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "step_device_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "request_queue_time_seconds_sum") == 0.75
    assert value(metrics, "request_prefill_time_seconds_sum") == 1.5


def test_cache_counters_add_up_and_gauges_are_of_now() -> None:
    metrics = ServerMetrics("tiny")
    metrics.on_step(step(prefix_queried_tokens=100, prefix_hit_tokens=64, kv_waste_tokens=9))
    metrics.on_step(
        step(prefix_queried_tokens=20, kv_waste_tokens=7, pages_cached=4, pages_stored=3)
    )
    metrics.on_step(step(pages_loaded=2, device_idle_seconds=0.25))
    assert value(metrics, "prefix_cache_queries_total") == 120
    assert value(metrics, "prefix_cache_hits_total") == 64
    assert value(metrics, "kv_cache_waste_tokens") == 0
    assert value(metrics, "kv_cache_cached_pages") == 0
    assert value(metrics, "kv_offload_stored_pages_total") == 3
    assert value(metrics, "kv_offload_loaded_pages_total") == 2
    assert value(metrics, "device_idle_seconds_total") == 0.25


def test_late_compiles_follow_the_running_total() -> None:
    metrics = ServerMetrics("tiny")
    for total in (0, 2, 2, 3):
        metrics.on_step(step(late_compiles=total))
    assert value(metrics, "late_compiles_total") == 3


def test_choice_timer_uses_the_times_of_the_deltas() -> None:
    metrics = ServerMetrics("tiny")
    timer = ChoiceTimer(metrics, arrival=100.0, num_prompt_tokens=11)

    def tell(now: float, num_tokens: int, reason: str | None = None) -> None:
        timer.on_delta(OutputDelta("r", 0, "", (1,) * num_tokens, finish_reason=reason), now)

    tell(101.0, 0)  # text held back, no token: not a first token
    tell(102.0, 1)
    tell(102.5, 1)
    tell(103.5, 2)
    tell(104.0, 0, "length")
    assert value(metrics, "time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.5
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 0.5
    assert value(metrics, "request_decode_time_seconds_sum") == 1.5
    assert value(metrics, "e2e_request_latency_seconds_sum") == 4.0
    assert value(metrics, "request_prompt_tokens_sum") == 11
    assert value(metrics, "request_generation_tokens_sum") == 4
    assert value(metrics, "request_success_total", finished_reason="length") == 1


def test_startup_phases_and_cache_config_are_labelled() -> None:
    metrics = ServerMetrics("tiny")
    metrics.set_startup("load", 1.5)
    metrics.set_cache_config({"page_size": 16, "num_pages": 100})
    assert value(metrics, "startup_seconds", phase="load") == 1.5
    assert value(metrics, "cache_config_info", page_size="16", num_pages="100") == 1


def test_accepted_parameters_are_counted() -> None:
    metrics = ServerMetrics("tiny")
    metrics.on_request(SamplingParams(n=2, max_tokens=7))
    assert value(metrics, "request_params_n_sum") == 2
    assert value(metrics, "request_params_max_tokens_sum") == 7


async def test_served_requests_show_up() -> None:
    async with serve(FakeEngine(list(b"abcd")), ByteModel()) as server:
        await server.complete(prompt=["x", "y"], n=2, max_tokens=4)
        await server.events("/v1/completions", {"prompt": "x", "max_tokens": 50})
        assert await server.metric("time_to_first_token_seconds_count") == 6  # and the probe's
        assert await server.metric("generation_tokens_total") == 3 + 16 + 5
        assert await server.metric("request_generation_tokens_sum") == 3 + 16 + 5
        assert await server.metric("request_success_total", finished_reason="length") == 5
        assert await server.metric("request_success_total", finished_reason="stop") == 1
        mean = await server.metric("e2e_request_latency_seconds_sum") / 6
        assert math.isfinite(mean)
        async with server.session.get(server.url + "/metrics") as response:
            assert response.content_type == "text/plain"
