"""EngineClient with a scripted engine: results once, refusals early, death and health seen."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxserve.engine.client import EngineClient
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

PIECES = ["<eos>", "A", "lice", "!", "\n", "why", "?", "O", " P", " Q", "x"]
EOS, A, LICE, BANG, NEWLINE, WHY, QUESTION, OH, P, Q, X = range(len(PIECES))
V = len(PIECES)
WAIT = 10.0  # seconds; nothing here takes more than a fraction of one


class Collector:
    """A sink that keeps every delta and can be waited for."""

    def __init__(self, num_choices: int = 1) -> None:
        self.num_choices = num_choices
        self.deltas: list[OutputDelta] = []
        self._queue: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()

    def __call__(self, delta: OutputDelta) -> None:
        self._queue.put(delta)

    def next(self) -> OutputDelta:
        delta = self._queue.get(timeout=WAIT)
        self.deltas.append(delta)
        return delta

    def wait(self) -> "Collector":
        """Until every choice has ended; more than one end per choice is an error."""
        while sum(d.finish_reason is not None for d in self.deltas) < self.num_choices:
            self.next()
        ended = [d.index for d in self.deltas if d.finish_reason is not None]
        assert sorted(ended) == list(range(self.num_choices))
        return self

    def assert_silent(self) -> None:
        assert self._queue.empty()

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)

    def ids(self, index: int = 0) -> list[int]:
        return [i for d in self.deltas if d.index == index for i in d.token_ids]

    def end(self, index: int = 0) -> OutputDelta:
        (last,) = [d for d in self.deltas if d.index == index and d.finish_reason]
        return last


@contextmanager
def running(engine: FakeEngine, *, max_inflight: int = 64, seed: int = 0) -> Iterator[EngineClient]:
    tokenizer = FakeTokenizer(PIECES, special=[EOS])
    client = EngineClient(
        engine,
        tokenizer,
        vocab_size=V,
        eos_token_ids=[EOS],
        seed=seed,
        max_inflight=max_inflight,
    )
    client.start()
    try:
        yield client
    finally:
        engine.step_gate.set()
        engine.warm_up_gate.set()
        client.shutdown()
    if engine.fail_at_step is None and engine.warm_up_error is None:
        assert engine.freed == Counter(request.request_id for request in engine.added)


def ask(client: EngineClient, request_id: str = "r", prompt=(A,), **params) -> Collector:
    request = GenerationRequest(request_id, tuple(prompt), SamplingParams(**params))
    sink = Collector(request.params.n)
    client.submit(request, sink)
    return sink


def eventually(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)


def test_streams_tokens_and_ends_once():
    with running(FakeEngine([A, LICE, BANG])) as client:
        client.wait_ready(WAIT)
        result = ask(client).wait()
        assert result.text() == "Alice!"
        assert result.ids() == [A, LICE, BANG, EOS]
        assert (result.end().finish_reason, result.end().stop_reason) == ("stop", None)
        assert client.num_inflight == 0
        result.assert_silent()


def test_length_and_stop_token_reasons():
    with running(FakeEngine([A, LICE, BANG])) as client:
        short = ask(client, "short", max_tokens=2).wait()
        assert (short.text(), short.end().finish_reason) == ("Alice", "length")
        stopped = ask(client, "id", stop_token_ids=[BANG]).wait()
        assert (stopped.text(), stopped.ids()) == ("Alice", [A, LICE, BANG])
        assert (stopped.end().finish_reason, stopped.end().stop_reason) == ("stop", BANG)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_b03_stop_string_ends_the_request_in_the_engine(tokens_per_step):
    engine = FakeEngine(
        [A, LICE, BANG, NEWLINE, WHY, X], tokens_per_step=tokens_per_step, step_seconds=0.001
    )
    with running(engine) as client:
        result = ask(client, stop=["\n", "Alice:"], max_tokens=1000, ignore_eos=True).wait()
        assert result.text() == "Alice!"
        assert result.ids() == [A, LICE, BANG, NEWLINE]
        assert (result.end().finish_reason, result.end().stop_reason) == ("stop", "\n")
        eventually(lambda: engine.finished_at == {"r-0": 4})
        result.assert_silent()


def test_late_stop_drops_surplus_tokens():
    """The engine is steps ahead of the text side, as with asynchronous scheduling."""
    engine = FakeEngine([A, BANG, X, X, X, X, X], step_seconds=0.002)
    hold = threading.Event()
    with running(engine) as client:
        blocker = Collector()

        def slow_sink(delta: OutputDelta) -> None:
            hold.wait(WAIT)
            blocker(delta)

        request = GenerationRequest("slow", (A,), SamplingParams(max_tokens=1))
        client.submit(request, slow_sink)
        result = ask(client, stop="!", max_tokens=500, ignore_eos=True)
        eventually(lambda: engine.num_steps > 20)
        hold.set()
        assert result.wait().text() == "A"
        assert result.ids() == [A, BANG]
        eventually(lambda: engine.finished_at == {"r-0": 2})
        blocker.wait()
        result.assert_silent()


def test_late_stop_of_a_request_that_has_ended_in_the_engine():
    engine = FakeEngine([A, BANG, X])
    hold = threading.Event()
    with running(engine) as client:
        client.submit(
            GenerationRequest("slow", (A,), SamplingParams(max_tokens=1)),
            lambda delta: hold.wait(WAIT) and None,
        )
        result = ask(client, stop="!", max_tokens=16)
        eventually(lambda: engine.num_open == 0 and engine.num_steps > 3)
        hold.set()
        assert result.wait().end().finish_reason == "stop"
        alive = ask(client, "next").wait()
        assert alive.ids() == [A, BANG, X, EOS]
    assert engine.finished_at == {}
    assert engine.freed["r-0"] == 1


def test_choices_share_a_seed_and_end_once_each():
    engine = FakeEngine(lambda request: [A] * (request.choice + 1))
    with running(engine) as client:
        result = ask(client, n=3, seed=7).wait()
        assert [result.text(j) for j in range(3)] == ["A", "AA", "AAA"]
        assert [(r.request_id, r.choice, r.seed) for r in engine.added] == [
            ("r-0", 0, 7),
            ("r-1", 1, 7),
            ("r-2", 2, 7),
        ]


def test_seeds_are_drawn_from_the_root():
    def seeds(root: int) -> list[int]:
        engine = FakeEngine([A])
        with running(engine, seed=root) as client:
            for number in range(3):
                ask(client, str(number)).wait()
        return [request.seed for request in engine.added]

    first = seeds(1)
    assert len(set(first)) == 3
    assert first == seeds(1)
    assert not set(first) & set(seeds(2))
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [V], [5279552648203111001], [1, V + 7], [1, True], [1.0], ["1"], [10**5000]],
)
def test_b06_bad_prompt_ids_are_refused_by_name(prompt):
    engine = FakeEngine([A])
    with running(engine) as client:
        with pytest.raises(InvalidRequestError) as error:
            ask(client, "bad", prompt)
        assert error.value.param == "prompt"
        assert len(str(error.value)) < 300
        if prompt:
            assert str(V) in str(error.value)
        assert ask(client, "alive").wait().text() == "A"
    assert [request.request_id for request in engine.added] == ["alive-0"]


def test_b06_error_names_the_id():
    with (
        running(FakeEngine([A])) as client,
        pytest.raises(InvalidRequestError, match=f"token id {V + 7};.* {V} ids"),
    ):
        ask(client, prompt=[1, V + 7])


def test_b14_limits_are_checked_before_the_engine():
    engine = FakeEngine([A], max_model_len=10)
    with running(engine) as client:
        for prompt_tokens, max_tokens in [(10, 1), (11, None), (10, None), (4, 7)]:
            with pytest.raises(InvalidRequestError) as error:
                ask(client, prompt=[A] * prompt_tokens, max_tokens=max_tokens)
            assert "10" in str(error.value)
            assert str(prompt_tokens) in str(error.value)
        result = ask(client, prompt=[A] * 5, max_tokens=None, ignore_eos=True).wait()
        assert (len(result.ids()), result.end().finish_reason) == (5, "length")
        with pytest.raises(InvalidRequestError, match="min_tokens is 6"):
            ask(client, prompt=[A] * 5, max_tokens=None, min_tokens=6)
    assert len(engine.added) == 1


def test_b01_what_can_never_fit_is_refused_at_once():
    engine = FakeEngine([A], max_model_len=4096, capacity_tokens=100)
    with running(engine) as client:
        with pytest.raises(InvalidRequestError, match="100 tokens"):
            ask(client, prompt=[A] * 90, max_tokens=11)
        assert ask(client, "ok", prompt=[A] * 90, max_tokens=10).wait().text() == "A"


def test_b38_ids_of_params_are_checked_against_the_model():
    with running(FakeEngine([A])) as client:
        for params in ({"logit_bias": {V: 1.0}}, {"stop_token_ids": [V]}):
            with pytest.raises(InvalidRequestError, match=f"token id {V}"):
                ask(client, **params)


def test_inflight_bound():
    engine = FakeEngine([A] * 50)
    engine.step_gate.clear()
    with running(engine, max_inflight=3) as client:
        first = ask(client, "first", n=2)
        with pytest.raises(QueueFullError, match="2 of at most 3"):
            ask(client, "second", n=2)
        with pytest.raises(InvalidRequestError, match="n is 4"):
            ask(client, "never", n=4)
        with pytest.raises(InvalidRequestError, match="running"):
            ask(client, "first")
        third = ask(client, "third")
        engine.step_gate.set()
        first.wait()
        third.wait()
        ask(client, "first", n=3).wait()  # the id is free again


def test_refusal_by_the_engine_becomes_an_error_delta():
    engine = FakeEngine([A] * 50, max_rows=1, max_queue=0)
    engine.step_gate.clear()
    with running(engine) as client:
        first = ask(client, "first")
        second = ask(client, "second")
        engine.step_gate.set()
        assert second.wait().end().finish_reason == "error"
        assert "1 requests are open" in second.end().error
        assert first.wait().end().finish_reason == "length"


def test_b02_abort_while_running_ends_with_one_delta():
    engine = FakeEngine([A], step_seconds=0.001)
    with running(engine) as client:
        result = ask(client, n=2, max_tokens=4000, ignore_eos=True)
        result.next()
        client.abort("r")
        client.abort("r")
        client.abort("unknown")
        result.wait()
        assert {result.end(0).finish_reason, result.end(1).finish_reason} == {"abort"}
        assert client.num_inflight == 0
        client.abort("r")
        assert ask(client, "alive", max_tokens=1).wait().text() == "A"
        result.assert_silent()
    assert engine.freed == {"r-0": 1, "r-1": 1, "alive-0": 1}


def test_b02_abort_before_the_engine_has_seen_the_request():
    engine = FakeEngine([A])
    engine.warm_up_gate.clear()
    with running(engine) as client:
        result = ask(client)
        client.abort("r")
        engine.warm_up_gate.set()
        result.wait()
        assert (result.end().finish_reason, result.ids()) == ("abort", [])
    assert engine.freed == {"r-0": 1}


def test_abort_ends_a_request_whose_submit_was_interrupted(monkeypatch):
    """Ctrl-C between entering the table and reaching the engine: the abort must still end it."""
    engine = FakeEngine([A])
    with running(engine) as client:
        sink = Collector()

        def interrupted(self, request):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(EngineThread, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit(GenerationRequest("r", (A,), SamplingParams()), sink)
        client.abort("r")
        assert sink.wait().end().finish_reason == "abort"
        assert ask(client, "r").wait().text() == "A"


def test_aborting_from_the_sink():
    engine = FakeEngine([A], step_seconds=0.001)
    with running(engine) as client:
        collector = Collector()

        def sink(delta: OutputDelta) -> None:
            client.abort("r")
            collector(delta)

        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        client.submit(GenerationRequest("r", (A,), params), sink)
        assert collector.wait().end().finish_reason == "abort"


def test_a_sink_that_raises_loses_only_its_request():
    engine = FakeEngine([A], step_seconds=0.001)
    with running(engine) as client:
        calls: list[OutputDelta] = []

        def bad_sink(delta: OutputDelta) -> None:
            calls.append(delta)
            raise RuntimeError("the user has gone")

        params = SamplingParams(n=2, max_tokens=4000, ignore_eos=True)
        client.submit(GenerationRequest("bad", (A,), params), bad_sink)
        eventually(lambda: engine.freed["bad-0"] == 1 and engine.freed["bad-1"] == 1)
        assert len(calls) == 1
        assert client.num_inflight == 0
        assert ask(client, "alive", max_tokens=2).wait().text() == "A"
        assert client.is_healthy(WAIT)


def test_text_that_cannot_be_made_is_an_error_of_its_request():
    with running(FakeEngine(lambda r: [V + 5] if r.request_id == "bad-0" else [A])) as client:
        bad = ask(client, "bad", max_tokens=500).wait()
        assert bad.end().finish_reason == "error"
        assert ask(client, "alive").wait().text() == "A"


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
