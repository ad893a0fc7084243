"""The two real models say what transformers says, through the Python API and through HTTP.

reference/ was made by transformers in float32 from the same GGUF files; its margins are all
above 0.004, so every id must agree. Logprobs within 1e-3 of the first step's top five.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.llm import RequestOutput
from jaxserve.server.app import make_app
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.settings import ServerSettings
from tests.support.running_server import serve_app

REFERENCE = Path(__file__).parent / "reference"
TOLERANCE = 1e-3
# Few buckets, to compile little: 8 rows and 64 prefill tokens a step, so prompts are also chunked.
SETTINGS: dict[str, Any] = {"max_batch_rows": 8, "max_batch_tokens": 64, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5)

pytestmark = [pytest.mark.model, pytest.mark.slow]


def items(name: str) -> list[dict[str, Any]]:
    return json.loads((REFERENCE / f"{name}.json").read_text())["items"]


SMOLLM2, GEMMA3 = items("smollm2"), items("gemma3")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def gemma3() -> Iterator[LLM]:
    with LLM("gemma3-270m", **SETTINGS) as llm:
        yield llm


def check_outputs(got: list[RequestOutput], want: list[dict[str, Any]]) -> None:
    for output, item in zip(got, want, strict=True):
        assert list(output.prompt_token_ids) == item["prompt_ids"]
        choice = output.outputs[0]
        assert list(choice.token_ids) == item["greedy_ids"]
        assert choice.logprobs is not None
        first = choice.logprobs[0]
        for token, logprob in item["first_step_top5"]:
            assert first[token].logprob == pytest.approx(logprob, abs=TOLERANCE)
        for logprobs, token, logprob in zip(
            choice.logprobs, item["greedy_ids"], item["greedy_logprobs"], strict=True
        ):
            assert logprobs[token].logprob == pytest.approx(logprob, abs=TOLERANCE)


def test_smollm2_all_at_once_and_alone(smollm2: LLM) -> None:
    texts = [{"prompt_token_ids": item["prompt_ids"]} for item in SMOLLM2]
    check_outputs(smollm2.generate(texts, GREEDY, use_tqdm=False), SMOLLM2)
    for text, item in zip(texts[:3], SMOLLM2, strict=False):
        check_outputs(smollm2.generate(text, GREEDY, use_tqdm=False), [item])


def test_smollm2_chat_gives_the_reference_prompts_and_answers(smollm2: LLM) -> None:
    conversations = [[{"role": "user", "content": item["user"]}] for item in SMOLLM2]
    check_outputs(smollm2.chat(conversations, GREEDY, use_tqdm=False), SMOLLM2)


def test_smollm2_stops_at_eos_with_the_reference_text(smollm2: LLM) -> None:
    conversations = [[{"role": "user", "content": item["user"]}] for item in SMOLLM2]
    params = SamplingParams(temperature=0, max_tokens=64)
    for output, item in zip(smollm2.chat(conversations, params, False), SMOLLM2, strict=True):
        end = item["first_eos_index"]
        choice = output.outputs[0]
        assert choice.text == item["greedy_text"]
        assert choice.finish_reason == ("length" if end is None else "stop")
        assert len(choice.token_ids) == (64 if end is None else end + 1)


def check_answer(answer: dict[str, Any], want: list[dict[str, Any]], llm: LLM) -> None:
    text_of = llm.get_tokenizer().id_to_token
    for choice, item in zip(answer["choices"], want, strict=True):
        assert choice["token_ids"] == item["greedy_ids"]
        top = choice["logprobs"]["top_logprobs"][0]
        for token, logprob in item["first_step_top5"]:
            assert top[text_of(token)] == pytest.approx(logprob, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
async def test_http_all_at_once_and_alone(name: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(name)
    want = items(name)
    app = make_app(llm.client, llm.model, ServerSettings(), ServerMetrics(name))
    greedy = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
    async with serve_app(app, None) as server:
        prompts = [item["prompt_ids"] for item in want]
        together = await server.complete(prompt=prompts, logprobs=5, **greedy)
        check_answer(together, want, llm)
        alone = await server.complete(prompt=prompts[0], logprobs=5, **greedy)
        check_answer(alone, want[:1], llm)
        events = await server.events("/v1/completions", {"prompt": prompts[0], **greedy})
        chunks = [event["choices"][0] for event in events[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == alone["choices"][0]["text"]


def test_gemma3_all_at_once_and_alone(gemma3: LLM) -> None:
    texts = [item["text"] for item in GEMMA3]
    check_outputs(gemma3.generate(texts, GREEDY, use_tqdm=False), GEMMA3)
    check_outputs(gemma3.generate(texts[0], GREEDY, use_tqdm=False), GEMMA3[:1])
