"""Which bucket a step is padded to changes no bit, and none is compiled while serving."""

import pytest

from jaxserve.sampling_params import SamplingParams
from tests.engine.test_native_bits import packed_model
from tests.support.matrix import said
from tests.support.tiny_engine import drive, random_prompts, request, tiny_engine

pytestmark = pytest.mark.as_served

PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)
SHAPES = ((64, 1), (317, 8))  # max_batch_tokens, max_batch_rows


@pytest.mark.slow
def test_b54_the_same_bits_in_every_bucket_and_no_late_compile() -> None:
    """The first request that asks for logprobs comes after warm-up, alone and in company."""
    prompt, *others = random_prompts(8, (40, 90), seed=2)
    numbers = []
    for tokens, rows in SHAPES:
        engine = tiny_engine(
            packed_model("llama-f32"),
            max_batch_tokens=tokens,
            max_batch_rows=rows,
            attention_backend="cpu",
        )
        drive(engine, [request("first", others[0], PLAIN)])
        for company in ([], others[: rows - 1]):
            engine.kv_manager.clear()
            run = drive(
                engine,
                [request(f"o{i}", other, PLAIN) for i, other in enumerate(company)]
                + [request("it", prompt, LOGPROBS)],
            )
            numbers.append((run.tokens["it"], said(run)["it"]))
        assert max(bucket.prefill_tokens for bucket in engine.ready_buckets) >= tokens
        assert engine.runner.late_compiles == 0
    assert all(found == numbers[0] for found in numbers[1:])
