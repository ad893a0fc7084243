"""The load generator against a scripted server: what it sends, and what it makes of streams."""

import asyncio
import re
import time

import pytest

from jaxserve.bench.arrivals import Arrivals
from jaxserve.bench.load_client import Outcome, Target, request_body
from jaxserve.bench.load_generator import LoadResult, check_target, first_model, run_load
from jaxserve.bench.serve import ServeBench, run_serve_bench
from jaxserve.bench.serving_metrics import request_times, summarise
from jaxserve.bench.workload import BenchRequest, RandomWorkload
from jaxserve.errors import EngineDeadError
from tests.support.openai_stand_in import Script, delta, serve_script, text, usage

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


async def load(script: Script, path: str, count: int = 1, limit: int | None = None) -> LoadResult:
    async with serve_script(script) as url:
        requests = [BenchRequest(16, text="hi") for _ in range(count)]
        target = Target(url + path, {"model": "toy"})
        return await run_load(target, requests, [0.0] * count, limit, lambda outcome: None)


async def one(script: Script, path: str = PLAIN) -> Outcome:
    return (await load(script, path)).outcomes[0]


async def test_b60_first_text_and_tokens_per_chunk():
    """Role chunk at 0.1 s, first text at 1.0 s, then 4 tokens a chunk, usage; one broken stream."""
    chunks = [(0.4, delta(content=" four more tokens")) for _ in range(4)]
    good = [
        (0.1, delta(role="assistant", content="")),
        (0.9, delta(content="Four tokens to start")),
        *chunks,
        (0.0, delta("length")),
        (0.0, usage(7, 20)),
    ]
    broken = [(0.05, delta(role="assistant", content="")), (0.05, delta(content="x")), (0, None)]
    script = Script([good, broken])
    result = await load(script, CHAT, count=2)
    summary = summarise(result)
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (7, 20)
    (outcome,) = [outcome for outcome in result.outcomes if outcome.error is None]
    # Against the server's own clock, so that a busy machine does not fail the test.
    first, last = script.sent[0][1], script.sent[0][6]
    late = 1e3 * (first - outcome.started) - 1000
    assert 990 <= summary["mean_ttft_ms"] <= 1050 + max(late, 0)
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * (first - outcome.started), abs=50)
    assert summary["mean_e2el_ms"] == pytest.approx(1e3 * (last - outcome.started), rel=0.05)
    assert summary["mean_itl_ms"] == pytest.approx(1e3 * (last - first) / 16, rel=0.05)
    assert summary["mean_tpot_ms"] == pytest.approx(1e3 * (last - first) / 19, rel=0.05)
    assert len(request_times(outcome).itl) == 16


@pytest.mark.parametrize(
    "first",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"refusal": "no"},
    ],
)
async def test_b60_any_channel_is_a_first_token(first):
    empty = {"content": "", "reasoning_content": None, "tool_calls": []}
    turn = [(0.0, delta(**empty)), (0.2, delta(**first)), (0.2, delta("stop", content="x"))]
    script = Script([[*turn, (0, usage(1, 2))]])
    outcome = await one(script, CHAT)
    first = 1e3 * (script.sent[0][1] - outcome.started)
    assert request_times(outcome).ttft == pytest.approx(first, abs=50)


async def test_running_usage_gives_exact_gaps():
    """A server that counts in every chunk: 1 token, then 3, then a flush of held text, then 2."""
    steps = [(0.05, "a", 1), (0.3, "bcd", 4), (0.05, "flush", 4), (0.15, "ef", 6)]
    turn = [
        (at, text(content) | {"usage": usage(3, count)["usage"]}) for at, content, count in steps
    ]
    script = Script([[*turn, (0, text("", "length"))]])
    gaps = request_times(await one(script)).itl
    start, middle, _, end, _ = script.sent[0]
    wanted = [1e3 * (middle - start) / 3] * 3 + [1e3 * (end - middle) / 2] * 2
    assert gaps == pytest.approx(wanted, abs=15)


async def test_without_usage_chunks_are_counted():
    outcome = await one(Script([[(0, text("a")), (0, text("b")), (0, text("", "stop"))]]))
    assert outcome.error is None
    assert (outcome.output_tokens, outcome.num_output_tokens) == (None, 2)


async def test_an_empty_answer_counts_but_has_no_first_token():
    outcome = await one(Script([[(0.05, text("", "stop")), (0, usage(3, 1))]]))
    times = request_times(outcome)
    assert outcome.error is None
    assert (times.ttft, times.tpot, times.itl) == (None, None, [])
    assert times.e2el > 40


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script([[(0, text("a")), (0, None)]]), "Error"),
        (Script([[(0, text("a"))]], done=False), "broke off before it was finished"),
        (Script([[(0, {"error": {"message": "engine died"}})]]), "engine died"),
        (Script([[(0, {"choices": "what"})]]), "not an OpenAI stream"),
        (Script([[(0, {"choices": [], "usage": {}}), (0, {"usage": {"x": 1}})]]), "OpenAI stream"),
        (Script([[]], status=503), "HTTP 503.*no such thing"),
    ],
)
async def test_failures_are_told_and_excluded(script, reason):
    result = await load(script, PLAIN)
    (outcome,) = result.outcomes
    assert outcome.error is not None
    assert re.search(reason, outcome.error)
    assert len(outcome.error) <= 200
    summary = summarise(result)
    assert (summary["failed"], summary["mean_ttft_ms"], summary["output_throughput"]) == (
        1,
        None,
        0,
    )


async def test_no_server_is_a_failure_not_a_crash():
    target = Target("http://127.0.0.1:9/v1/completions", {})
    result = await run_load(target, [BenchRequest(1, text="a")], [0.0], None, lambda outcome: None)
    assert "ClientConnectorError" in str(result.outcomes[0].error)
    with pytest.raises(EngineDeadError, match=r"a first request to .* failed.*Check --base-url"):
        await check_target(target)
    with pytest.raises(EngineDeadError, match="no server answers at"):
        await first_model("http://127.0.0.1:9", {})


async def test_the_concurrency_limit_holds_and_waiting_is_not_latency():
    turn = [(0.1, text("a")), (0, text("", "stop")), (0, usage(1, 1))]
    script = Script([turn])
    result = await load(script, PLAIN, count=4, limit=2)
    assert script.most_running == 2
    assert summarise(result)["max_concurrent_requests"] == 2
    assert result.duration >= 0.2
    slowest = max(request_times(outcome).e2el for outcome in result.outcomes)
    assert slowest < 800 * result.duration


async def test_requests_are_sent_on_schedule():
    script = Script([[(0, text("a", "stop"))]])
    async with serve_script(script) as url:
        requests = [BenchRequest(1, text="a") for _ in range(3)]
        start = time.perf_counter()
        result = await run_load(
            Target(url + PLAIN, {}), requests, [0.0, 0.15, 0.3], None, lambda outcome: None
        )
    sent = [outcome.started - start for outcome in result.outcomes]
    for at, planned in zip(sent, [0.0, 0.15, 0.3], strict=True):
        assert planned <= at < planned + 0.5


async def test_warmups_comparison_and_headers():
    turn = [(0.05, text("a")), (0, text("b", "length")), (0, usage(4, 2))]
    script = Script([turn])
    async with serve_script(script) as url:
        assert await first_model(url, {}) == "toy"
        workload = RandomWorkload(4, 4, 2, vocab_size=1000, seed=0)
        bench = ServeBench(
            target=Target(url + PLAIN, {"model": "toy"}, {"Authorization": "Bearer k"}),
            requests=workload.requests,
            arrivals=Arrivals(),
            max_concurrency=None,
            num_warmups=2,
            seed=0,
            compare_sequential=True,
        )
        report = await run_serve_bench(bench)
    assert len(script.bodies) == 1 + 2 + 4 + 4  # first check, warm-ups, run, sequential run
    assert all(headers["Authorization"] == "Bearer k" for headers in script.headers)
    assert report["max_concurrent_requests"] == 4
    assert report["sequential"]["max_concurrent_requests"] == 1
    assert report["speedup"] == pytest.approx(
        report["output_throughput"] / report["sequential"]["output_throughput"]
    )
    assert report["speedup"] > 1.2
    prompts = [tuple(body["prompt"]) for body in script.bodies[3:]]
    assert len(set(prompts)) == 8, "a run must not profit from what the one before left cached"


async def test_every_request_failing_is_an_error():
    turns = [[(0, text("a", "stop"))], [(0, None)]]
    script = Script(turns)
    async with serve_script(script) as url:
        bench = ServeBench(
            target=Target(url + PLAIN, {}),
            requests=RandomWorkload(2, 4, 2, vocab_size=1000, seed=0).requests,
            arrivals=Arrivals(),
            max_concurrency=1,
            num_warmups=0,
            seed=0,
        )
        with pytest.raises(EngineDeadError, match="every request failed"):
            await run_serve_bench(bench)


async def test_a_cancelled_run_leaves_no_tasks():
    script = Script([[(5, text("a"))]])
    async with serve_script(script) as url:
        run = asyncio.create_task(
            run_load(Target(url + PLAIN, {}), [BenchRequest(1, text="a")], [0], None, print)
        )
        await asyncio.sleep(0.1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "run_load" in repr(task)]


def test_request_bodies():
    fields = {"model": "m", "temperature": 0.0}
    plain, chat = Target("http://h/v1/completions", fields), Target("http://h" + CHAT, fields)
    common = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5, **fields}
    ids = BenchRequest(5, token_ids=(1, 2))
    words = BenchRequest(5, text="hi")
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    talk = BenchRequest(5, messages=messages)
    assert request_body(plain, ids) == common | {"prompt": [1, 2]}
    assert request_body(plain, words) == common | {"prompt": "hi"}
    assert request_body(plain, talk) == common | {"prompt": "s\nu"}
    assert request_body(chat, words) == common | {"messages": [{"role": "user", "content": "hi"}]}
    assert request_body(chat, talk) == common | {"messages": list(messages)}
