"""OfflineBatch over a scripted engine: order of ends, bounded look-ahead, jobs of many requests."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from jaxserve.engine.batch_display import batch_display
from jaxserve.engine.offline_batch import BatchProgress, OfflineBatch
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from tests.support.client_harness import BANG, A, X, ask, eventually, running
from tests.support.fake_engine import FakeEngine


@dataclass
class Work:
    """A job that notes what it hears."""

    name: str
    requests: tuple[GenerationRequest, ...] = ()
    deltas: list[OutputDelta] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)

    @property
    def reasons(self) -> list[str]:
        return sorted(d.finish_reason for d in self.deltas if d.finish_reason)


def work(name: str, *lengths: int, n: int = 1) -> Work:
    """One request per length; a request ends after so many tokens."""
    requests = tuple(
        GenerationRequest(
            f"{name}.{i}", (A,), SamplingParams(n=n, max_tokens=length, ignore_eos=True)
        )
        for i, length in enumerate(lengths)
    )
    return Work(name, requests)


def test_jobs_come_in_the_order_of_their_ends() -> None:
    with running(FakeEngine([X])) as client:
        jobs = [work("long", 400), work("short", 2), work("both", 200, 3, n=2), work("none")]
        batch = OfflineBatch(client, jobs)
        ended = list(batch.run())
    assert [job.name for job in ended] == ["none", "short", "both", "long"]
    assert [len(job.reasons) for job in ended] == [0, 1, 4, 1]
    assert batch.progress.finished_jobs == 4
    assert batch.progress.output_tokens == 400 + 2 + 2 * 203
    assert batch.progress.prompt_tokens == 4


@pytest.mark.parametrize("max_open", [1, 5, None])
def test_reads_no_further_ahead_than_there_is_room(max_open: int | None) -> None:
    read, taken, furthest = 0, 0, 0

    def jobs() -> Iterator[Work]:
        nonlocal read, furthest
        for number in range(300):
            read += 1
            furthest = max(furthest, read - taken)
            yield work(str(number), 1 + number % 3)

    engine = FakeEngine([X])
    with running(engine, max_inflight=16) as client:
        for _ in OfflineBatch(client, jobs(), max_open=max_open).run():
            taken += 1
    assert taken == 300
    limit = max_open or 16
    assert engine.max_open <= limit
    # One more is read and waits; those of a moment end together and are handed out one by one.
    assert furthest <= 2 * limit + 1


def test_a_job_wider_than_the_engine_runs_in_parts() -> None:
    engine = FakeEngine([X])
    with running(engine, max_inflight=4) as client:
        (job,) = OfflineBatch(client, [work("wide", *[3] * 50, n=2)]).run()
    assert job.reasons == ["length"] * 100
    assert engine.max_open <= 4


def test_waits_for_room_that_others_have_taken() -> None:
    engine = FakeEngine([X], step_seconds=0.002)
    with running(engine, max_inflight=2) as client:
        others = [ask(client, f"other{i}", max_tokens=40, ignore_eos=True) for i in range(2)]
        (job,) = OfflineBatch(client, [work("late", 3, 2)]).run()
        assert job.reasons == ["length", "length"]
        for other in others:
            other.wait()


def test_stopping_early_aborts_what_is_open() -> None:
    engine = FakeEngine([X], step_seconds=0.001)
    with running(engine) as client:
        jobs = [work("first", 1), *(work(f"endless{i}", 4000) for i in range(5))]
        results = OfflineBatch(client, jobs).run()
        assert next(results).name == "first"
        results.close()
        assert engine.num_open == 0
        assert client.num_inflight == 0


def test_a_source_that_fails_aborts_what_is_open() -> None:
    def jobs() -> Iterator[Work]:
        yield work("endless", 4000)
        raise InvalidRequestError("line 2 is bad")

    engine = FakeEngine([X], step_seconds=0.001)
    with running(engine) as client:
        with pytest.raises(InvalidRequestError, match="line 2"):
            list(OfflineBatch(client, jobs()).run())
        eventually(lambda: engine.num_open == 0)


def test_a_dead_engine_is_no_result() -> None:
    with running(FakeEngine([X], fail_at_step=3)) as client:
        jobs = [work("a", 1), work("b", 50)]
        ended: list[str] = []
        with pytest.raises(EngineDeadError, match="the device is gone"):
            ended.extend(job.name for job in OfflineBatch(client, jobs).run())
        assert "b" not in ended


def test_progress_is_told_while_nothing_ends() -> None:
    engine = FakeEngine([X, BANG])
    engine.step_gate.clear()
    told = threading.Event()

    def tell(progress: BatchProgress) -> None:
        if progress.finished_jobs == 0:
            told.set()
            engine.step_gate.set()

    with running(engine) as client:
        assert [job.name for job in OfflineBatch(client, [work("a", 3)]).run(tell)] == ["a"]
    assert told.is_set()


def test_display_shows_lines_where_no_terminal_is(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.engine.batch_display.LINE_SECONDS", 0.0)
    progress = BatchProgress(7, finished_jobs=2)
    with batch_display("lines", progress) as tell:
        progress.finished_jobs, progress.failed_jobs, progress.output_tokens = 5, 1, 10
        tell(progress)
    out, err = capfd.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first.startswith("lines 5/7, in 0 tok/s, out ")
    assert last.endswith("tok/s, 1 failed")


def test_display_is_a_bar_in_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = BatchProgress(None)
    with batch_display("prompts", progress) as tell:
        progress.finished_jobs = 3
        tell(progress)
    err = capfd.readouterr().err
    assert "3/?" in err
    assert "out 0 tok/s" in err
