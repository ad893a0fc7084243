"""Offline throughput and latency, with a fake LLM whose times and counts are known."""

import time
from types import SimpleNamespace

import pytest

from jaxserve.bench.offline import run_latency, run_throughput
from jaxserve.bench.report import latency_text, throughput_text
from jaxserve.bench.sampling import BenchSampling
from jaxserve.bench.workload import BenchRequest, RandomWorkload


class FakeLLM:
    """Takes 20 ms for any batch, writes max_tokens tokens per prompt, remembers its prompts."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        self.batches.append(list(prompts))
        time.sleep(0.02)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt.get("prompt_token_ids", [1, 2, 3]),
                outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens)],
            )
            for prompt, one in zip(prompts, params, strict=True)
        ]

    def chat(self, messages, params, use_tqdm):
        return self.generate(
            [{"prompt": talk[0]["content"]} for talk in messages], params, use_tqdm
        )


WORKLOAD = RandomWorkload(4, 10, 5, vocab_size=1000, seed=0)


def test_throughput_and_its_comparison():
    llm = FakeLLM()
    report = run_throughput(llm, WORKLOAD.requests, BenchSampling(), compare_sequential=True)
    assert [len(batch) for batch in llm.batches] == [1, 4, 1, 1, 1, 1]
    assert (report["num_requests"], report["total_num_tokens"]) == (4, 60)
    assert report["total_output_tokens"] == 20
    elapsed = report["elapsed_time"]
    assert elapsed >= 0.02
    assert report["requests_per_second"] == pytest.approx(4 / elapsed)
    assert report["tokens_per_second"] == pytest.approx(60 / elapsed)
    assert report["output_tokens_per_second"] == pytest.approx(20 / elapsed)
    sequential = report["sequential"]
    assert sequential["num_requests"] == 4
    assert sequential["elapsed_time"] >= 0.08
    assert report["speedup"] == pytest.approx(sequential["elapsed_time"] / elapsed)
    prompts = [tuple(p["prompt_token_ids"]) for batch in llm.batches[1:] for p in batch]
    assert len(set(prompts)) == 8, "the second run must not find its prompts in a cache"
    text = throughput_text(report | {"model": "toy", "sampling": BenchSampling().describe()})
    assert "sampling  greedy (temperature 0.0, stops at EOS)" in text
    assert f"one after another: {report['speedup']:.2f}x" in text


def test_text_and_chat_prompts():
    llm = FakeLLM()
    text = [BenchRequest(2, text="hello")]
    talk = [BenchRequest(2, messages=({"role": "user", "content": "hi"},))]
    assert run_throughput(llm, lambda run: text, BenchSampling())["total_num_tokens"] == 5
    assert run_throughput(llm, lambda run: talk, BenchSampling())["total_num_tokens"] == 5
    assert [batch[0]["prompt"] for batch in llm.batches[::2]] == ["hello", "hi"]


def test_latency():
    llm = FakeLLM()
    report = run_latency(llm, WORKLOAD.requests, BenchSampling(), warmups=1, iterations=3)
    assert len(llm.batches) == 4
    assert len(report["latencies"]) == 3
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 3)
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["percentiles"]["50"] == sorted(report["latencies"])[1]
    assert "average (s)" in latency_text(report)
