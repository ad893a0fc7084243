"""Steps and page moves that fail at any point: requests are recomputed, nothing is left over."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.page_programs import PagesHandle
from jaxserve.engine.request import Request
from jaxserve.engine.runner import StepHandle
from jaxserve.engine.step_times import StepTimes
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_native_bits import packed_model
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    AMPLE,
    Run,
    drive,
    random_prompts,
    request,
    single_steps,
    take_in,
    tiny_engine,
    tiny_model,
)

MODEL = tiny_model()
PROGRAMS = SharedPrograms()
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PENALTIES = SamplingParams(
    temperature=0.8, seed=3, frequency_penalty=0.6, max_tokens=10, ignore_eos=True
)
PROMPTS = random_prompts(4, (20, 40), seed=5)
HOST_MEMORY = 1 << 15
MAX_STEPS = 400


class Untimed(StepTimes):
    """What a step holds depends on no clock: a request whose step fails twice running is given up,
    and whether that happens must not be chance."""

    def prefill_limit(self, num_decode: int, sizes: tuple[int, ...], context: int = 0) -> int:
        return sizes[-1] if sizes else sys.maxsize

    def swap_is_cheaper(self, page_size: int, num_groups: int) -> bool:
        return True


def make(**settings: Any) -> Engine:
    engine = single_steps(tiny_engine(MODEL, loader=PROGRAMS, **settings))
    engine.scheduler.step_times = Untimed()
    return engine


def traffic() -> list[Request]:
    """Prompts of which the second half begins like the first, greedy and with penalties."""
    prompts = [*PROMPTS, *([*prompt[:19], 1, 2] for prompt in PROMPTS)]
    params = (GREEDY, PENALTIES)
    return [request(str(i), prompt, params[i % 2]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected() -> Run:
    return drive(make(prefix_cache=False, asynchronous=False), traffic(), together=False)


def run(engine: Engine, requests: list[Request], max_steps: int = MAX_STEPS) -> Run:
    """Like `drive`, but steps may fail."""
    run = Run()
    for item in requests:
        engine.add(item)
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for event in engine.step():
            take_in(run, event)
        engine.check_integrity()
    assert not engine.has_work, "requests that never end"
    assert engine.kv_manager.num_used == 0
    return run


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Iterator[bool]) -> None:
    """Have calls of a method raise where `when` says so, and as they should once it is used up."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        if next(when, False):
            raise RuntimeError("the device has lost it")
        return original(*args)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("at", [0, 1, 4, 9, 17])
def test_a_result_that_is_lost_changes_no_token(
    at: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, expected: Run
) -> None:
    engine = make(asynchronous=asynchronous)
    failing(monkeypatch, StepHandle, "result", iter([*[False] * at, True]))
    got = run(engine, traffic())
    assert got.tokens == expected.tokens
    assert set(got.finish.values()) == {"length"}


@pytest.mark.parametrize("every", [5, 8])
def test_steps_that_fail_now_and_then_cost_time_only(
    every: int, monkeypatch: pytest.MonkeyPatch, expected: Run
) -> None:
    engine = make(pages=40)
    failing(monkeypatch, StepHandle, "result", (i % every == every - 1 for i in range(99)))
    assert run(engine, traffic()).tokens == expected.tokens


@pytest.mark.parametrize(
    ("owner", "name"),
    [("runner", "read_pages"), ("runner", "write_pages"), ("runner", "copy_pages"),
     (PagesHandle, "result")],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 3])
def test_pages_that_cannot_be_moved_are_computed_again(
    owner: Any, name: str, at: int, monkeypatch: pytest.MonkeyPatch, expected: Run
) -> None:
    engine = make(num_pages=AMPLE if name == "copy_pages" else 30, kv_host_memory=HOST_MEMORY)
    calls = 0

    def when() -> Iterator[bool]:
        nonlocal calls
        while True:
            calls += 1
            yield calls == at + 1

    failing(monkeypatch, engine.runner if owner == "runner" else owner, name, when())
    for _ in range(2):  # the second time with what is in host memory
        got = run(engine, traffic())
        assert got.tokens == expected.tokens
        assert set(got.finish.values()) == {"length"}
    assert calls > at, "it never came to that"


def test_what_fails_at_its_second_chunk_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first chunk runs well each time: that must not make it begin again for ever."""
    engine = make()
    bad, good = request("bad", [200] * 100, GREEDY), request("good", [65], GREEDY)
    expected = drive(engine, [request("good", [65], GREEDY)]).tokens
    original = engine.runner.dispatch

    def dispatch(bucket: Any, batch: Any, *rest: Any) -> Any:
        if ((batch.tokens == 200) & (batch.positions >= 70)).any():
            raise RuntimeError("the device does not like it")
        return original(bucket, batch, *rest)

    monkeypatch.setattr(engine.runner, "dispatch", dispatch)
    got = run(engine, [good, bad])
    assert got.finish == {"bad": "error", "good": "length"}
    assert "failed twice" in got.errors["bad"]
    assert got.tokens["good"] == expected["good"]


def test_one_fault_of_two_steps_is_one_failure(
    monkeypatch: pytest.MonkeyPatch, expected: Run
) -> None:
    """The step in flight is lost, and the next one cannot be dispatched because of that."""
    engine, got = make(), Run()
    for item in traffic():
        engine.add(item)
    faults = 0
    while engine.has_work:
        with monkeypatch.context() as patch:
            if faults < 6:
                failing(patch, StepHandle, "result", iter([True]))
                failing(patch, engine.runner, "dispatch", iter([True]))
                faults += 1
            events = engine.step()
        for _ in range(4):
            events += engine.step()
        for event in events:
            take_in(got, event)
    assert set(got.finish.values()) == {"length"}
    assert got.tokens == expected.tokens


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_pages_full_of_nan_that_nobody_wrote_are_not_seen(backend: str) -> None:
    """Whatever a page held before, a request sees what was written for it only."""
    models = make(attention_backend=backend) if backend == "reference" else cpu_engine()
    first = drive(models, traffic())
    models.kv_manager.clear()
    pool = models.runner._pool
    models.runner._pool = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, np.nan), pool)
    assert drive(models, traffic()).tokens == first.tokens


def cpu_engine() -> Engine:
    return tiny_engine(packed_model("gemma3-f32"), attention_backend="cpu", max_chunk=7)
