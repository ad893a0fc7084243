"""`jaxserve serve`: the port opens first, requests run, signals end it well."""

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from jaxserve.cli import engine_start, serve
from jaxserve.cli.main import app
from jaxserve.errors import ModelLoadError
from tests.support.fake_start import FakeStart
from tests.support.running_server import read_metric

Driver = Callable[[str], None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON (or text)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, content = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read().decode()
    return status, json.loads(content) if content.startswith("{") else content


def wait_for_health(url: str, expected: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if fetch(url + "/health")[0] == expected:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"/health did not become {expected}")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> FakeStart:
    fake = FakeStart(list(b"served"), step_seconds=0.005)
    monkeypatch.setattr(engine_start, "start_engine", fake)
    monkeypatch.setattr("jaxserve.loading.hub.resolve", lambda name: name)
    return fake


def serve_while(drive: Driver, *arguments: str) -> tuple[Result, list[BaseException]]:
    """Run `jaxserve serve` on this thread (signals need the main one) and `drive` on another."""
    port = free_port()
    failures: list[BaseException] = []

    def run_driver() -> None:
        try:
            drive(f"http://127.0.0.1:{port}")
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    driver = threading.Thread(target=run_driver)
    driver.start()
    result = CliRunner().invoke(app, ["serve", "fake", "--port", str(port), *arguments])
    driver.join(20)
    return result, failures


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_b58_port_opens_before_the_model_is_loaded(start: FakeStart) -> None:
    start.gate.clear()

    def drive(url: str) -> None:
        wait_for_health(url, 503)
        status, answer = fetch(url + "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "loading")
        start.gate.set()
        wait_for_health(url, 200)
        _, answer = fetch(url + "/v1/completions", {"model": "fake", "prompt": "x"})
        assert answer["choices"][0]["text"] == "served"
        text = fetch(url + "/metrics")[1]
        assert read_metric(text, "startup_seconds", phase="warm_up") == 1.0
        assert read_metric(text, "cache_config_info", page_size="16") == 1
        assert read_metric(text, "generation_tokens_total") == 7
        stop()

    result, failures = serve_while(drive)
    assert not failures
    assert result.exit_code == 0, result.output
    assert re.search(r"listening on http://127\.0\.0\.1:\d+; loading fake", result.stderr)
    assert re.search(r"serving fake at http://127\.0\.0\.1:\d+/v1", result.stderr)
    assert "curl http://127.0.0.1" in result.stderr


def test_sigterm_lets_running_requests_end(start: FakeStart) -> None:
    answers = []

    def drive(url: str) -> None:
        wait_for_health(url, 200)
        threading.Timer(0.2, stop).start()
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        answers.append(fetch(url + "/v1/completions", body))

    result, failures = serve_while(drive, "--shutdown-timeout", "20")
    assert not failures
    assert result.exit_code == 0
    status, answer = answers[0]
    assert (status, answer["usage"]["completion_tokens"]) == (200, 100)


@pytest.mark.parametrize("signals", [1, 2], ids=["timeout", "second signal"])
def test_what_does_not_end_in_time_is_aborted(start: FakeStart, signals: int) -> None:
    answers = []

    def drive(url: str) -> None:
        wait_for_health(url, 200)
        for number in range(signals):
            threading.Timer(0.2 + 0.2 * number, stop).start()
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        answers.append(fetch(url + "/v1/completions", body))

    began = time.monotonic()
    timeout = "0.3" if signals == 1 else "600"
    result, failures = serve_while(drive, "--shutdown-timeout", timeout)
    assert not failures
    assert result.exit_code == 0
    assert answers[0][1]["choices"][0]["finish_reason"] == "abort"
    assert time.monotonic() - began < 15
    assert start.engines[0].num_open == 0


def test_failed_loading_is_one_line_and_exit_code_1(start: FakeStart) -> None:
    start.error = ModelLoadError("tensor blk.0.attn_q.weight is missing")
    result = CliRunner().invoke(app, ["serve", "fake", "--port", str(free_port())])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: tensor blk.0.attn_q.weight is missing"


def test_port_in_use_is_one_line_and_exit_code_1(start: FakeStart) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "fake", "--port", port])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(
        f"error: cannot listen on 127.0.0.1 port {port}"
    )
    assert not start.options


def test_stop_while_loading_ends_at_once(start: FakeStart, monkeypatch: pytest.MonkeyPatch) -> None:
    start.gate.clear()
    codes: list[int] = []
    monkeypatch.setattr(serve.os, "_exit", codes.append)

    def drive(url: str) -> None:
        wait_for_health(url, 503)
        stop()

    result, failures = serve_while(drive)
    start.gate.set()
    assert not failures
    assert codes == [130]
    assert "stopped while loading" in result.stderr


def test_options_reach_server_and_engine(start: FakeStart) -> None:
    def drive(url: str) -> None:
        wait_for_health(url, 200)
        assert fetch(url + "/v1/models")[0] == 401
        request = urllib.request.Request(
            url + "/v1/models", headers={"Authorization": "Bearer key"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            assert [card["id"] for card in json.load(response)["data"]] == ["a", "b"]
        stop()

    arguments = ["--api-key", "key", "--served-model-name", "a", "--served-model-name", "b"]
    arguments += ["--max-num-seqs", "3", "--kv-cache-memory-bytes", "1000000", "--log-requests"]
    arguments += ["--quantization", "int8", "--scheduling-policy", "prefix", "--batching", "static"]
    arguments += ["--kv-host-memory", "2M", "--enable-prefix-caching"]
    arguments += ["--speculative-config", '{"method": "ngram"}', "--speculative-audit", "0.01"]
    result, failures = serve_while(drive, *arguments)
    assert not failures
    assert result.exit_code == 0
    config = start.options[0].config
    assert (config.max_batch_rows, config.kv_memory) == (3, 1_000_000)
    assert (config.scheduling, config.batching) == ("prefix", "static")
    assert (config.prefix_cache, config.kv_host_memory) == (True, 2 << 20)
    assert (config.speculative.method, config.speculative_audit) == ("ngram", 0.01)
    assert start.options[0].quantization == "int8"


@pytest.mark.parametrize("name", ["--no-prefix-cache", "--no-enable-prefix-caching"])
def test_prefix_cache_can_be_switched_off(start: FakeStart, name: str) -> None:
    def drive(url: str) -> None:
        wait_for_health(url, 200)
        stop()

    result, failures = serve_while(drive, name)
    assert not failures
    assert result.exit_code == 0
    assert not start.options[0].config.prefix_cache
    result = CliRunner().invoke(app, ["serve", "fake", name, "--kv-host-memory", "1M"])
    assert result.exit_code == 1
    assert "leave the cache on" in result.stderr


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{", "is not JSON"),
        ("[]", "give a JSON object"),
        ('{"method": "magic"}', "choose one of ngram, suffix"),
        ('{"method": "ngram", "num_speculative_tokens": 0.5}', "whole number from 1 to"),
        ('{"method": "ngram", "speed": 3}', "unknown key 'speed'"),
        ('{"method": "ngram", "model": "' + "x" * 1000 + '"}', "leave it out"),
    ],
)
def test_a_wrong_speculative_config_is_told_before_anything_starts(
    start: FakeStart, given: str, shown: str
) -> None:
    result = CliRunner().invoke(
        app, ["serve", "tiny", "--speculative-config", given], terminal_width=2000
    )
    assert result.exit_code == 2
    told = " ".join(result.output.replace("│", " ").split())
    assert "--speculative-config" in told
    assert shown in told
    assert "x" * 50 not in told
    assert "Traceback" not in told
