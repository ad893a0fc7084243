"""EngineClient as it starts, hangs, dies and shuts down, with a scripted engine."""

import threading
import time

import pytest

from jaxserve.engine.client import EngineClient
from jaxserve.errors import EngineDeadError
from tests.support.client_harness import (
    BANG,
    LICE,
    PIECES,
    WAIT,
    A,
    Collector,
    V,
    ask,
    eventually,
    running,
)
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer


def test_b58_dead_engine_fails_everyone_at_once():
    engine = FakeEngine([A], fail_at_step=5)
    with running(engine) as client:
        client.wait_ready(WAIT)
        open_requests = [ask(client, str(i), ignore_eos=True, max_tokens=500) for i in range(3)]
        started = time.monotonic()
        for result in open_requests:
            end = result.wait().end()
            assert end.finish_reason == "error"
            assert "the device is gone" in end.error
        assert time.monotonic() - started < 5
        eventually(lambda: not client.is_ready)
        assert not client.is_healthy(WAIT)
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
            ask(client, "later")
        assert client.num_inflight == 0


def test_b58_frozen_engine_is_unhealthy_after_the_limit_and_recovers():
    engine = FakeEngine([A] * 20)
    with running(engine) as client:
        client.wait_ready(WAIT)
        assert client.is_healthy(0.0)  # idle is healthy, however long
        engine.step_gate.clear()
        result = ask(client)
        eventually(lambda: not client.is_healthy(0.05))
        assert client.is_healthy(60.0)
        engine.step_gate.set()
        result.wait()
        eventually(lambda: client.is_healthy(0.0))


def test_b58_busy_is_healthy():
    engine = FakeEngine([A], step_seconds=0.01)
    with running(engine) as client:
        client.wait_ready(WAIT)
        results = [ask(client, str(i), ignore_eos=True, max_tokens=50) for i in range(4)]
        eventually(lambda: engine.num_steps > 40)
        assert client.is_healthy(1.0)
        for result in results:
            result.wait()


def test_b58_loading_is_not_ready():
    engine = FakeEngine([A])
    engine.warm_up_gate.clear()
    with running(engine) as client:
        assert not client.is_ready
        assert not client.is_healthy(WAIT)
        with pytest.raises(TimeoutError, match="not ready"):
            client.wait_ready(0.01)
        engine.warm_up_gate.set()
        client.wait_ready(WAIT)
        assert client.is_healthy(WAIT)


def test_failed_warm_up_is_told_to_all():
    engine = FakeEngine([A], warm_up_error=MemoryError("no room for the pool"))
    engine.warm_up_gate.clear()
    with running(engine) as client:
        early = ask(client)
        engine.warm_up_gate.set()
        with pytest.raises(EngineDeadError, match="no room for the pool"):
            client.wait_ready(WAIT)
        assert early.wait().end().finish_reason == "error"
        with pytest.raises(EngineDeadError):
            ask(client, "later")


def test_shutdown_aborts_what_is_open():
    engine = FakeEngine([A], step_seconds=0.001)
    with running(engine) as client:
        result = ask(client, ignore_eos=True, max_tokens=4000)
        result.next()
        client.shutdown()
        assert result.wait().end().finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="shutting down"):
            ask(client, "later")
        client.shutdown()
    assert engine.freed == {"r-0": 1}


def test_shutdown_drains():
    engine = FakeEngine([A] * 16, step_seconds=0.005)
    with running(engine) as client:
        results = [ask(client, str(i)) for i in range(3)]
        client.shutdown(drain_seconds=WAIT)
        assert [r.wait().end().finish_reason for r in results] == ["length"] * 3


def test_submit_before_start_is_refused():
    client = EngineClient(
        FakeEngine([A]), FakeTokenizer(PIECES), vocab_size=V, eos_token_ids=[], max_inflight=1
    )
    with pytest.raises(EngineDeadError, match="not been started"):
        ask(client)
    client.shutdown()


def test_many_threads_submit_and_abort():
    engine = FakeEngine([A, LICE, BANG] * 5, max_rows=8)
    with running(engine, max_inflight=1000) as client:
        results: dict[str, Collector] = {}

        def work(worker: int) -> None:
            for number in range(20):
                name = f"{worker}.{number}"
                results[name] = ask(client, name, n=2)
                if number % 3 == 0:
                    client.abort(name)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        for result in results.values():
            result.wait()
        assert client.num_inflight == 0
        assert len(engine.freed) == 160
