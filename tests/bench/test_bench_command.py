"""`jaxserve bench` as typed, against a scripted server."""

import asyncio
import json

import pytest
import typer
from typer.testing import CliRunner

from jaxserve.cli.bench import register
from tests.support.openai_stand_in import Script, delta, serve_script, text, usage

APP = typer.Typer()
register(APP)
COMPLETION = [(0.01, text("a")), (0.01, text("b", "length")), (0, usage(128, 4))]


async def run(*arguments: str):
    return await asyncio.to_thread(CliRunner().invoke, APP, ["bench", *arguments])


async def test_serve_reports_and_saves(tmp_path):
    script = Script([COMPLETION])
    async with serve_script(script) as url:
        result = await run(
            *["serve", "--base-url", url + "/", "--num-prompts", "3", "--max-concurrency", "2"],
            *["--random-input-len", "5", "--random-output-len", "4", "--ignore-eos"],
            *["--goodput", "ttft:10000", "tpot:10000", "--metric-percentiles", "50,90"],
            *["--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"],
        )
    assert result.exit_code == 0, result.output
    assert "sampling  greedy (temperature 0.0, ignore_eos True)" in result.stdout
    assert "3 random prompts, 5 tokens in, 4 out, seed 0" in result.stdout
    assert "all requests at once, at most 2 in flight" in result.stdout
    report = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (report["completed"], report["total_output_tokens"]) == (3, 12)
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    assert {"p50_ttft_ms", "p90_itl_ms", "std_tpot_ms", "median_e2el_ms"} < set(report)
    assert report["errors"] == {}
    body = script.bodies[-1]
    assert body["model"] == "toy"
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (5, 4, True)


async def test_serve_compares_with_one_after_another():
    async with serve_script(Script([COMPLETION])) as url:
        result = await run("serve", "--base-url", url, "--compare-sequential", "--num-prompts", "4")
    assert result.exit_code == 0, result.output
    assert "concurrent    sequential" in result.stdout
    assert "speedup in output tokens/s over one after another:" in result.stdout


async def test_serve_chat_with_a_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"conversations": [{"from": "human", "value": "hi"}]}\n')
    script = Script([[(0, delta(content="x")), (0, delta("stop")), (0, usage(9, 1))]])
    async with serve_script(script) as url:
        result = await run(
            *["serve", "--base-url", url, "--endpoint", "/v1/chat/completions", "--top-p", "0.5"],
            *["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "2"],
        )
    assert result.exit_code == 0, result.output
    assert script.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]
    assert script.bodies[-1]["top_p"] == 0.5
    assert "ignore_eos" not in script.bodies[-1], "not every server knows it"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--goodput", "ttft"], "metric:milliseconds"),
        (["stray"], "metric:milliseconds"),
        (["--percentile-metrics", "foo"], "percentile metric 'foo'"),
        (["--metric-percentiles", "101"], "metric percentiles"),
        (["--metric-percentiles", "a"], "metric percentiles"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--request-rate", "0"], "request_rate is 0"),
        (["--dataset-name", "sonnet", "--model", "m"], "choose random, or sharegpt"),
        (["--dataset-name", "sharegpt", "--model", "m"], "--dataset-path FILE"),
        (["--base-url", "http://127.0.0.1:9"], "no server answers at"),
    ],
)
async def test_mistakes_are_one_line_before_anything_is_sent(arguments, reason):
    result = await run("serve", "--port", "9", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


async def test_offline_commands_report_an_unknown_model():
    for command in ("throughput", "latency"):
        result = await run(command, "--model", "/no/such/model")
        assert result.exit_code == 1
        assert "error: " in result.stderr
