"""EngineClient with a scripted engine: results once, refusals early, aborts from anywhere."""

import threading

import pytest

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.sampling_params import SamplingParams
from tests.support.client_harness import (
    BANG,
    EOS,
    LICE,
    NEWLINE,
    WAIT,
    WHY,
    A,
    Collector,
    V,
    X,
    ask,
    eventually,
    running,
)
from tests.support.fake_engine import FakeEngine


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
