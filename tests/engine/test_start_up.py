"""Starting: one bucket is enough to serve, the others come beside it, traces come from disk."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax import export

from jaxserve.config import EngineConfig
from jaxserve.core.buckets import Bucket, first_bucket
from jaxserve.core.program_loader import Lowered, Program, ProgramLoader
from jaxserve.core.program_store import ProgramStore
from jaxserve.engine.engine import Engine
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import (
    AMPLE,
    SMALL,
    Run,
    collect_stats,
    drive,
    random_prompts,
    request,
    tiny_model,
)

SETTINGS = {
    **SMALL,
    "num_pages": AMPLE,
    "max_batch_tokens": 100,
    "attention_backend": "reference",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPTS = random_prompts(3, (80, 100), seed=5)
MODEL = tiny_model()
SMALLEST = "mixed4+64"


class GatedLoader(ProgramLoader):
    """Gives the first bucket's two programs at once, and the others once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.given = 0
        self.error: Exception | None = None

    def lower(self, program: Program) -> Lowered:
        if self.given >= 2:
            self.gate.wait()
            if self.error is not None:
                raise self.error
        self.given += 1
        return super().lower(program)


def make_engine(loader: ProgramLoader | None = None, **changes: object) -> Engine:
    return Engine(MODEL, EngineConfig(**{**SETTINGS, **changes}), loader=loader)


def some_requests(params: SamplingParams = GREEDY) -> list:
    return [request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]


def eventually_all(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while len(engine.ready_buckets) < len(engine.bucket_table):
        assert time.monotonic() < deadline, engine.ready_buckets
        time.sleep(0.01)


@pytest.fixture(scope="module")
def expected() -> Run:
    engine = make_engine()
    engine.warm_up()
    assert set(engine.ready_buckets) == set(engine.bucket_table)
    return drive(engine, some_requests())


def test_one_bucket_serves_everything_until_the_others_are_there(expected: Run) -> None:
    loader = GatedLoader()
    engine, heard = make_engine(loader), []
    engine.warm_up(heard.append, wait_for_all=False)
    assert [bucket.name for bucket in engine.ready_buckets] == [SMALLEST]
    stats = collect_stats(engine)
    assert drive(engine, some_requests()).tokens == expected.tokens
    assert {s.bucket for s in stats if s.step_tokens} == {SMALLEST}
    loader.gate.set()
    eventually_all(engine)
    stats.clear()
    assert drive(engine, some_requests()).tokens == expected.tokens
    used = {s.bucket for s in stats}
    assert "decode4" in used
    assert used & {"mixed4+16", "mixed4+32", "mixed4+100"}
    assert {s.late_compiles for s in stats} == {0}
    while not any(
        line.startswith(f"all {len(engine.bucket_table)} shapes loaded") for line in heard
    ):
        time.sleep(0.01)  # it is told after they are there


def test_penalties_wait_for_the_program_they_need() -> None:
    loader = GatedLoader()
    engine = make_engine(loader)
    engine.warm_up(wait_for_all=False)
    threading.Timer(0.2, loader.gate.set).start()
    params = replace(GREEDY, repetition_penalty=1.3)
    early = drive(engine, some_requests(params)).tokens
    eventually_all(engine)
    assert drive(engine, some_requests(params)).tokens == early


def test_shapes_that_cannot_be_loaded_are_done_without(
    expected: Run, caplog: pytest.LogCaptureFixture
) -> None:
    loader = GatedLoader()
    engine = make_engine(loader)
    engine.warm_up(wait_for_all=False)
    loader.error = MemoryError("no room")
    loader.gate.set()
    while "some shapes could not be loaded" not in caplog.text:
        time.sleep(0.01)
    assert drive(engine, some_requests()).tokens == expected.tokens


def test_closing_stops_loading() -> None:
    loader = GatedLoader()
    engine = make_engine(loader)
    engine.warm_up(wait_for_all=False)
    engine.close()
    loader.gate.set()
    thread = next(t for t in threading.enumerate() if t.name == "jaxserve-warm-up")
    thread.join(60)
    assert len(engine.ready_buckets) < len(engine.bucket_table)


def test_an_exit_while_loading_is_clean() -> None:
    program = (
        "from tests.engine.test_start_up import make_engine\n"
        "import threading\n"
        "def run():\n"
        "    engine = make_engine()\n"
        "    engine.warm_up(wait_for_all=False)\n"
        "    engine.close()\n"
        "thread = threading.Thread(target=run, daemon=True)\n"  # as the engine's thread is
        "thread.start(); thread.join()\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# ---------------------------------------------------------------- traces on disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, expected: Run) -> Path:
    """A store with everything that the engine needs."""
    folder = tmp_path_factory.mktemp("store") / "traced"
    engine = make_engine(ProgramLoader(ProgramStore(folder), start="test"))
    engine.warm_up()
    run = drive(engine, some_requests())
    assert run.tokens == expected.tokens
    assert run.margins == expected.margins  # the same bits as without a store
    return folder


def refuse_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was traced")

    monkeypatch.setattr(export, "export", refuse)


def test_a_later_start_traces_nothing(
    folder: Path, expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_trace(monkeypatch)
    loader = ProgramLoader(ProgramStore(folder), start="test")
    loader.prefetch()
    engine = make_engine(loader)
    engine.warm_up()
    run = drive(engine, some_requests())
    assert (run.tokens, run.margins) == (expected.tokens, expected.margins)
    assert all(engine.runner.forward_aliases_pool(bucket) for bucket in engine.bucket_table)
    penalised = some_requests(replace(GREEDY, presence_penalty=1.0))
    assert drive(engine, penalised).finish == {"0": "length", "1": "length", "2": "length"}


def test_native_kernels_are_in_traces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ran = ProgramStore(tmp_path / "traced"), []
    for _ in range(2):
        engine = make_engine(ProgramLoader(store, start="test"), attention_backend="auto")
        bucket = engine.bucket_table[0]
        engine.runner.load([bucket], engine._empty_inputs)
        ran.append(engine.runner.dispatch(bucket, *engine._empty_inputs(bucket)).result().tokens)
        refuse_to_trace(monkeypatch)
    assert ran[0].tolist() == ran[1].tolist()


def test_what_the_smallest_set_needs_is_loaded_ahead(folder: Path) -> None:
    class Counting(ProgramStore):
        loads = 0

        def load(self, key: str) -> bytes | None:
            Counting.loads += 1
            return super().load(key)

    loader = ProgramLoader(Counting(folder), start="test")
    loader.prefetch()
    assert loader._prefetched is not None
    begun = loader._prefetched.result()
    assert len(begun) == 2
    assert all(future.result() is not None for future in begun.values())
    before = Counting.loads
    engine = make_engine(loader)
    engine.runner.load([first_bucket(engine.bucket_table)], engine._empty_inputs)
    assert Counting.loads == before


@pytest.mark.parametrize("change", [{"max_batch_rows": 5}, {"num_pages": 77}, {"page_size": 8}])
def test_another_engine_traces_its_own(folder: Path, change: dict[str, int]) -> None:
    def keys(engine: Engine) -> set[str]:
        programs, shapes = engine.runner._programs, engine.runner._shapes
        params, pool, last, _ = shapes
        batch, _ = engine._empty_inputs(Bucket(4, 1, 4, 64))
        return {programs.forward_program(params, pool, batch, last).key()}

    assert keys(make_engine()) == keys(make_engine())
    assert not keys(make_engine()) & keys(make_engine(**change))


def test_a_damaged_trace_is_traced_again(folder: Path, expected: Run) -> None:
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    engine = make_engine(ProgramLoader(ProgramStore(folder), start="test"))
    engine.warm_up()
    assert drive(engine, some_requests()).tokens == expected.tokens


def test_a_model_of_ones_own_is_never_kept(tmp_path: Path) -> None:
    own = replace(MODEL.model, forward=lambda *args: MODEL.model.forward(*args))
    loader = ProgramLoader(ProgramStore(tmp_path / "traced"), start="test")
    engine = Engine(replace(MODEL, model=own), EngineConfig(**SETTINGS), loader=loader)
    engine.runner.load([engine.bucket_table[0]], engine._empty_inputs)
    assert list((tmp_path / "traced").iterdir()) == []
    assert jax.config.jax_compilation_cache_dir is not None  # what XLA made is kept all the same
